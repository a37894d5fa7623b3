"""Operators on DTensor and under FSDP2, in two real gloo processes."""

import subprocess
import sys
from pathlib import Path


def test_operators_support_all_dtensor_placements_and_fsdp(tmp_path):
    """Replicated or sharded over rows, positions, heads or classes: results and gradients match.

    Opaque operators keep rows and heads sharded, and they train under FSDP2.
    """
    script = str(Path(__file__).with_name("dtensor_process.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=200)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
