"""rms_norm and cross_entropy on DTensor, in two real gloo processes."""

import socket
import subprocess
import sys
from pathlib import Path


def test_rms_norm_and_cross_entropy_take_dtensors_however_they_are_split():
    """Replicated or split over rows, positions or classes: results and gradients stay the same."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    script = str(Path(__file__).with_name("dtensor_process.py"))
    processes = [
        subprocess.Popen([sys.executable, script, str(rank), port], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=200)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(told)
