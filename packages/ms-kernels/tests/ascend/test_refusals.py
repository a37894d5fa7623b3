"""What the null runtime does not have is refused by name, where it is called."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .null_runtime import bridge


def test_a_call_without_a_body_is_an_error_that_names_it():
    """Nothing is left undefined: the very call raises."""
    with pytest.raises(RuntimeError, match="no body for aclnnErfinv"):
        torch.zeros(4).npu().erfinv()


def test_what_a_body_refuses_is_an_error_that_says_why():
    """A limit that CANN documents holds here too."""
    x = torch.zeros(1, 4, 2, 896).npu()
    table = torch.zeros(1, 4, 1, 896).npu()
    with pytest.raises(RuntimeError, match="a head of 896; an even width below 896 fits"):
        torch.ops.npu.npu_rotary_mul(x, table, table)


def test_an_error_leaves_the_device_usable():
    """The next call works, and its error message is its own."""
    x = torch.ones(4).npu()
    with pytest.raises(RuntimeError, match="aclnnErfinv"):
        x.erfinv()
    assert (x + x).cpu().tolist() == [2.0] * 4
    with pytest.raises(RuntimeError, match="aclnnTan"):
        x.tan()


def test_fresh_memory_is_no_number():
    """What an operator forgot to write is seen: every tensor starts as NaN."""
    assert torch.empty(1000, device="npu").cpu().isnan().all()


def test_a_signature_that_does_not_fit_is_an_error():
    """What comes by reference is checked to be of its kind."""
    library = ctypes.CDLL("libopapi.so")
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    number = ctypes.c_double(1.0)
    scalar = library.aclCreateScalar
    scalar.restype = ctypes.c_void_p
    one = ctypes.c_void_p(scalar(ctypes.byref(number), 11))
    first = library.aclnnExpGetWorkspaceSize
    assert first(one, one, ctypes.byref(size), ctypes.byref(executor)) != 0
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    message = library.aclGetRecentErrMsg().decode()
    assert "aclnnExp: argument 0 is no descriptor of kind T" in message
    assert first(ctypes.c_void_p(8), one, ctypes.byref(size), ctypes.byref(executor)) != 0


def test_a_script_runs_by_the_command_and_its_calls_are_written(tmp_path):
    """The script is given its arguments, and every aclnn call stands in the file."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\nprint(sys.argv[1:], (torch.ones(2).npu() * 3).cpu().tolist())\n"
    )
    calls = tmp_path / "calls.txt"
    command = [sys.executable, "-m", "null_runtime", "--calls", str(calls), str(script), "x"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    here = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=here)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['x'] [3.0, 3.0]"  # torch_npu prints a line of its own
    assert calls.read_text() == "aclnnMuls float32[2] float32[2]\n"


def test_calls_are_recorded_within_the_block_alone():
    """What happens outside `record` is not in its list."""
    x = torch.ones(2, 3).npu()
    with bridge.record() as calls:
        torch.add(x, x)
    torch.add(x, x)
    assert [call.name for call in calls] == ["aclnnAdd"]
    assert calls[0].tensors == (("float32", (2, 3)),) * 3
