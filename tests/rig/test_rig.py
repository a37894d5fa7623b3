"""The test device computes the same as the CPU and rejects the same as CUDA."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ms_rig import run_on_rig

CHECKS = Path(__file__).with_name("checks.py")


def run_check(function: str) -> dict[str, Any]:
    """Run a check in one process with the device."""
    results: dict[str, Any] = run_on_rig(1, CHECKS, function)[0]
    return results


def test_operators_reject_tensors_of_different_devices() -> None:
    """Every operator raises an error that names the devices."""
    errors = run_check("mixed")
    assert all(errors.values()), errors
    prefix = "RuntimeError: Expected all tensors to be on the same device"
    for name in (
        "sum",
        "sum, in place",
        "another rig device",
        "concatenated",
        "embedding",
        "gathered",
    ):
        assert errors[name].startswith(prefix), errors[name]


@pytest.mark.parametrize("function", ["allowed", "computed", "chance"])
def test_the_device_computes_like_the_cpu(function: str) -> None:
    """It allows what CUDA allows, has the CPU's results, and its own random numbers."""
    results = run_check(function)
    assert all(results.values()), results


def test_collectives_accept_only_tensors_of_the_device() -> None:
    """Results arrive only after waiting, and inputs must not change before."""
    for results in run_on_rig(2, CHECKS, "groups"):
        assert results["sum"] == [2.0] * 4
        assert results["mean"] == [0.5] * 2
        assert results["before waiting"] == [1.0] * 2
        assert results["after waiting"] == [2.0] * 2
        assert "changed while a collective read it" in results["changed during a collective"]
        assert "No backend type associated with device type cpu" in results["a tensor of the CPU"]
        assert "this process's device is" in results["another device"]
        assert "No backend type associated with device type rig" in results["over gloo"]
        assert "must be contiguous" in results["not contiguous"]
        assert results["fsdp"]
        assert results["dtensor"] == 16.0


def test_other_processes_do_not_have_the_device() -> None:
    """The folder on this process's path changes nothing."""
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
