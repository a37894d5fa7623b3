"""Operators on DTensor and under FSDP2, in two real gloo processes."""

import subprocess
import sys
from pathlib import Path


def test_operators_take_dtensors_however_they_are_split_and_run_under_fsdp(tmp_path):
    """Replicated or split over rows, positions, heads or classes: results and gradients stay.

    Opaque operators keep their rows and heads where they are; blocks of them train under FSDP2.
    """
    script = str(Path(__file__).with_name("dtensor_process.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=200)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(told)
