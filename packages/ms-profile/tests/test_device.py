"""The recorder and the links on a device that is not the CPU (see `tests/rig/`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ms_rig import environment, run_on_rig

from ms_profile.log.manifest import read_ranks, ring_path
from ms_profile.log.ring import Kind, read_ring

pytest.importorskip("torch")
HERE = Path(__file__).parent


def test_links_are_measured_between_devices() -> None:
    """Also if gloo is configured next to the accelerator's own backend."""
    backends = ["rigccl", "cpu:gloo,rig:rigccl", "gloo"]
    first, second = run_on_rig(2, HERE / "device_runs.py", "links", backends=backends)
    assert [result["pairs"] for result in first] == [1, 1, 1]
    assert [result["on device"] for result in second] == [True, True, False]


@pytest.mark.parametrize("parallel", [pytest.param("none", marks=pytest.mark.slow), "fsdp"])
def test_a_run_on_two_devices_is_recorded(parallel: str, tmp_path: Path) -> None:
    """Steps, forward passes and collectives of a script that trains on the accelerator."""
    count = 1 if parallel == "none" else 2
    script = [str(HERE / "train_script.py")]
    script += ["--nproc-per-node", str(count)] if count > 1 else []
    command = [sys.executable, "-m", "ms_profile", "run", "--train-script", *script]
    command += ["--output-dir", str(tmp_path / "out"), "--skip", "1", "--active", "2"]
    command += ["--", "--steps", "6", "--on-accelerator", "--parallel", parallel]
    variables = {**os.environ, **environment(), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables)
    assert process.returncode == 0, process.stderr
    ranks = read_ranks(tmp_path / "out")
    assert [(rank.steps, rank.device) for rank in ranks] == [(6, "rig")] * count
    spans = read_ring(ring_path(tmp_path / "out", 0)).spans
    kinds = {Kind(kind) for kind in spans["kind"].tolist()}
    assert {Kind.FORWARD, Kind.BACKWARD} <= kinds
    assert len(ranks[0].traces) == 1
