"""The device of the tests: it computes as the CPU does, and refuses what CUDA would refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ms_rig import run_on_rig

CHECKS = Path(__file__).with_name("checks.py")


def ask(function: str) -> dict[str, Any]:
    """What one process with the device finds."""
    found: dict[str, Any] = run_on_rig(1, CHECKS, function)[0]
    return found


def test_tensors_of_two_devices_do_not_meet() -> None:
    """In no operator; each message names what was found."""
    found = ask("mixed")
    assert all(found.values()), found
    same = "RuntimeError: Expected all tensors to be on the same device"
    for name in ("sum", "sum, in place", "another of its kind", "joined", "looked up", "gathered"):
        assert found[name].startswith(same), found[name]


@pytest.mark.parametrize("function", ["allowed", "computed", "chance"])
def test_the_device_is_one(function: str) -> None:
    """What CUDA allows is allowed, numbers are the CPU's, and random numbers its own."""
    found = ask(function)
    assert all(found.values()), found


def test_collectives_are_of_devices_alone() -> None:
    """What is not waited for has not arrived, and what is read may not change."""
    for found in run_on_rig(2, CHECKS, "groups"):
        assert found["sum"] == [2.0] * 4
        assert found["mean"] == [0.5] * 2
        assert found["before waiting"] == [1.0] * 2
        assert found["after waiting"] == [2.0] * 2
        assert "changed while a collective read it" in found["changed under way"]
        assert "No backend type associated with device type cpu" in found["a tensor of the CPU"]
        assert "this process's device is" in found["another device"]
        assert "No backend type associated with device type rig" in found["over gloo"]
        assert "must be contiguous" in found["not contiguous"]
        assert found["fsdp"]
        assert found["dtensor"] == 16.0


def test_processes_that_do_not_ask_have_no_such_device() -> None:
    """This one: the folder on its path changes nothing."""
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
