"""Calls that the null runtime does not implement are refused by name."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .null_runtime import bridge


def test_a_call_without_a_body_raises_an_error_that_names_it():
    """The call itself raises, so no result is undefined."""
    with pytest.raises(RuntimeError, match="no body for aclnnErfinv"):
        torch.zeros(4).npu().erfinv()


def test_limits_documented_by_cann_are_errors():
    """The error message states the limit."""
    x = torch.zeros(1, 4, 2, 896).npu()
    table = torch.zeros(1, 4, 1, 896).npu()
    with pytest.raises(RuntimeError, match="head width must be even and below 896, got 896"):
        torch.ops.npu.npu_rotary_mul(x, table, table)


def test_an_error_leaves_the_device_usable():
    """The next call works, and a second error has its own message."""
    x = torch.ones(4).npu()
    with pytest.raises(RuntimeError, match="aclnnErfinv"):
        x.erfinv()
    assert (x + x).cpu().tolist() == [2.0] * 4
    with pytest.raises(RuntimeError, match="aclnnTan"):
        x.tan()


def test_fresh_memory_is_nan():
    """So an operator that does not write all its output is noticed."""
    assert torch.empty(1000, device="npu").cpu().isnan().all()


def test_a_wrong_signature_is_an_error():
    """The kind of every by-reference argument is checked."""
    library = ctypes.CDLL("libopapi.so")
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    number = ctypes.c_double(1.0)
    scalar = library.aclCreateScalar
    scalar.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(scalar(ctypes.byref(number), 11))
    get_workspace = library.aclnnExpGetWorkspaceSize
    assert get_workspace(handle, handle, ctypes.byref(size), ctypes.byref(executor)) != 0
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    message = library.aclGetRecentErrMsg().decode()
    assert "aclnnExp: argument 0 is not a descriptor of kind T" in message
    assert (
        get_workspace(ctypes.c_void_p(8), handle, ctypes.byref(size), ctypes.byref(executor)) != 0
    )


def test_the_command_runs_a_script_and_writes_its_calls(tmp_path):
    """The script gets its arguments, and the file lists every aclnn call."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\nprint(sys.argv[1:], (torch.ones(2).npu() * 3).cpu().tolist())\n"
    )
    calls = tmp_path / "calls.txt"
    command = [sys.executable, "-m", "null_runtime", "--calls", str(calls), str(script), "x"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "['x'] [3.0, 3.0]"  # torch_npu prints a line as well
    assert calls.read_text() == "aclnnMuls float32[2] float32[2]\n"


def test_calls_are_recorded_only_inside_the_block():
    """Calls after the `record` block are not in its list."""
    x = torch.ones(2, 3).npu()
    with bridge.record() as calls:
        torch.add(x, x)
    torch.add(x, x)
    assert [call.name for call in calls] == ["aclnnAdd"]
    assert calls[0].tensors == (("float32", (2, 3)),) * 3
