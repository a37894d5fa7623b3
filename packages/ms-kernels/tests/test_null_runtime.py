"""The null runtime without torch_npu: symbols, signatures, stubs, memory and calls through C."""

import ctypes
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .ascend.null_runtime import NullRuntimeError, bridge, start
from .ascend.null_runtime.bodies import BODIES
from .ascend.null_runtime.cli import main
from .ascend.null_runtime.signatures import Short, Single, entry_point, parameters_of
from .ascend.null_runtime.stubs import LIBRARIES, build, source_of
from .ascend.null_runtime.symbols import Names, defined, looked_up, undefined

GOLDEN = Path(__file__).parent / "ascend" / "golden"
NAMES = Names(operators=("aclnnAdd", "aclnnErfinv", "aclnnRmsNorm"), others=("aclrtGone", "_ZTIx"))

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def compile_library(folder, name, text):
    """Compile C into a shared library."""
    (folder / "source.c").write_text(text)
    library = folder / name
    command = ["cc", "-shared", "-fPIC", "-w", "-o", str(library), str(folder / "source.c")]
    subprocess.run(command, check=True)
    return library


@needs_compiler
def test_symbols_are_read_from_libraries(tmp_path):
    """A symbol that no library provides is undefined; Python's and libc's own are not."""
    text = """
        int aclInit(void); int PyErr_Clear(void); int puts(const char *);
        int own(void) { return 1; }
        int use(void) { return aclInit() + PyErr_Clear() + puts("x") + own(); }
        const char *asked[] = {"aclnnAdd", "aclnnAddGetWorkspaceSize", "aclrtMalloc", "aclnn x"};
    """
    library = compile_library(tmp_path, "lib.so", text)
    assert undefined([library]) == {"aclInit"}
    assert {"own", "use", "asked"} <= defined([library])
    names = looked_up(library.read_bytes())
    assert {"aclnnAdd", "aclnnAddGetWorkspaceSize", "aclrtMalloc"} <= names
    assert not any(" " in name for name in names)


def test_a_signature_is_derived_from_the_body_annotations():
    """Descriptor kinds, by-value arguments and nullable arguments."""

    def body(
        x: torch.Tensor,
        y: torch.Tensor | None,
        many: list[torch.Tensor],
        dims: list[int],
        keep: bool,
        eps: float,
        size: Short,
        rate: Single,
        mode: str,
    ) -> None:
        """Do nothing."""

    parameters = parameters_of(body)
    assert "".join(parameter.code for parameter in parameters) == "TTLIirirs"
    assert [parameter.name for parameter in parameters if parameter.optional] == ["y"]
    text = entry_point("aclnnThing", parameters)
    assert "aclnnThingGetWorkspaceSize(void *a0, void *a1, void *a2, void *a3, _Bool a4," in text
    assert "double a5, int a6, float a7, const char *a8, uint64_t *size, void **executor)" in text


@pytest.mark.parametrize("name", BODIES)
def test_every_body_is_fully_annotated(name):
    """A body without full annotations could not be called from C."""
    assert name.startswith("aclnn")
    parameters = parameters_of(BODIES[name])
    assert len(parameters) == len(inspect.signature(BODIES[name]).parameters)


def test_every_golden_call_has_a_body():
    """No call in the golden files has an undefined result."""
    files = sorted(GOLDEN.glob("*_*32.txt")) + sorted(GOLDEN.glob("*_bfloat16.txt"))
    assert len(files) == 10
    for path in files:
        lines = path.read_text().splitlines()
        calls = [line for line in lines if line.startswith("aclnn")]
        assert {call.split()[0] for call in calls} <= BODIES.keys()
        counts = [int(count) for count in re.findall(r"ward: (\d+) calls", path.read_text())]
        assert sum(counts) == len(calls)
    assert "forward: 12 calls" in (GOLDEN / "llama_float32.txt").read_text()


def test_a_missing_torch_npu_is_reported():
    """One line that says how to install it."""
    if "torch_npu" in sys.modules:
        pytest.skip("torch_npu is installed")
    with pytest.raises(NullRuntimeError, match="torch_npu is not installed; pip install"):
        start()


def test_a_missing_script_is_reported(capsys):
    """One line on stderr and exit code 2."""
    assert main(["no-such-script.py"]) == 2
    assert "there is no script no-such-script.py" in capsys.readouterr().err


def test_a_missing_compiler_is_reported(monkeypatch, tmp_path):
    """The environment variable CC is respected, and named if it points nowhere."""
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(NullRuntimeError, match="no C compiler; install one, or name it in CC"):
        build(tmp_path, NAMES)


def test_generated_stubs_refuse_calls_without_a_body():
    """Both phases of an unknown call refuse; hand-written functions are not generated."""
    text = source_of(NAMES, {"aclrtGone"})
    assert 'aclnnErfinvGetWorkspaceSize(void) { return null_refuse("aclnnErfinv"); }' in text
    assert "aclrtGone" not in text
    assert "EXPORT char _ZTIx[4096];" in text


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Build and load the stubs the way torch_npu would find them."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("stubs")
    main = build(folder, NAMES)
    assert all((folder / name).exists() for name in LIBRARIES)
    loaded = ctypes.CDLL(str(main))
    loaded.aclGetRecentErrMsg.restype = ctypes.c_char_p
    for name in ("aclCreateTensor", "aclCreateScalar"):
        getattr(loaded, name).restype = ctypes.c_void_p
    bridge.attach(loaded)
    return loaded


class Device:
    """A Python stand-in for a C program: memory, descriptors, and both phases of a call."""

    def __init__(self, library):
        self.library = library

    def put(self, values):
        """Copy floats to device memory and return its address."""
        address = ctypes.c_void_p()
        host = (ctypes.c_float * len(values))(*values)
        assert (
            self.library.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(4 * len(values)), 0)
            == 0
        )
        size = ctypes.c_size_t(4 * len(values))
        assert self.library.aclrtMemcpy(address, size, host, size, 1) == 0
        return address

    def get(self, address, count):
        """Copy floats from device memory."""
        host, size = (ctypes.c_float * count)(), ctypes.c_size_t(4 * count)
        assert self.library.aclrtMemcpy(host, size, address, size, 2) == 0
        return list(host)

    def tensor(self, address, sizes, strides, offset=0):
        """Describe float32 memory."""
        dims = ctypes.c_int64 * len(sizes)
        count = ctypes.c_uint64(len(sizes))
        handle = self.library.aclCreateTensor(
            *(dims(*sizes), count, 0, dims(*strides), ctypes.c_int64(offset), 2),
            *(dims(*sizes), count, address),
        )
        return ctypes.c_void_p(handle)

    def call(self, name, *arguments):
        """Run both phases of a call; return the error message, or None."""
        size, executor = ctypes.c_uint64(), ctypes.c_void_p()
        get_workspace = getattr(self.library, f"{name}GetWorkspaceSize")
        code = get_workspace(*arguments, ctypes.byref(size), ctypes.byref(executor))
        if not code:
            code = getattr(self.library, name)(None, size, executor, None)
        return self.library.aclGetRecentErrMsg().decode() if code else None


@pytest.fixture
def device(library):
    """A device whose calls are computed by the bodies."""
    return Device(library)


def test_a_call_through_c_computes_on_any_strides(device):
    """The sum x + 2 y, with y transposed and offset, is written to device memory."""
    x, y, out = device.put([1, 2, 3, 4]), device.put([9, 10, 20, 30, 40]), device.put([0] * 4)
    scalar = ctypes.c_double(2.0)
    alpha = ctypes.c_void_p(device.library.aclCreateScalar(ctypes.byref(scalar), 11))
    tensors = (
        device.tensor(x, (2, 2), (2, 1)),
        device.tensor(y, (2, 2), (1, 2), offset=1),
        device.tensor(out, (2, 2), (2, 1)),
    )
    with bridge.record() as calls:
        assert device.call("aclnnAdd", *tensors[:2], alpha, tensors[2]) is None
    assert device.get(out, 4) == [21, 62, 43, 84]
    assert calls == [bridge.Call("aclnnAdd", (("float32", (2, 2)),) * 3)]


def test_a_call_without_a_body_is_refused_by_name(device):
    """It returns an error code and a message that names the missing body."""
    assert "no body for aclnnErfinv" in device.call("aclnnErfinv", None, None)


def test_an_argument_of_the_wrong_kind_is_refused(device):
    """A scalar instead of a tensor, a stray pointer, and null."""
    value = ctypes.c_double(1.0)
    scalar = ctypes.c_void_p(device.library.aclCreateScalar(ctypes.byref(value), 11))
    x = device.tensor(device.put([1.0]), (1,), (1,))
    assert "argument 1 is not a descriptor" in device.call("aclnnAdd", x, scalar, scalar, x)
    stray = ctypes.c_void_p(4096)
    assert "argument 0 is not a descriptor" in device.call("aclnnAdd", stray, x, scalar, x)
    assert "other is null" in device.call("aclnnAdd", x, None, scalar, x)


def test_a_tensor_outside_device_memory_is_refused(device):
    """A host pointer, and a shape that extends past its allocation."""
    host = (ctypes.c_float * 4)()
    value = ctypes.c_double(1.0)
    alpha = ctypes.c_void_p(device.library.aclCreateScalar(ctypes.byref(value), 11))
    x = device.tensor(device.put([1.0]), (1,), (1,))
    for invalid in (
        device.tensor(ctypes.cast(host, ctypes.c_void_p), (4,), (1,)),
        device.tensor(device.put([1.0]), (100_000,), (1,)),
    ):
        assert "outside device memory" in device.call("aclnnAdd", invalid, x, alpha, x)


def test_memory_starts_as_nan_and_cannot_be_freed_twice(device):
    """So reads of unwritten memory show up in results."""
    address = ctypes.c_void_p()
    assert device.library.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(64), 0) == 0
    assert all(value != value for value in device.get(address, 16))
    assert device.library.aclrtFree(address) == 0
    assert device.library.aclrtFree(address) != 0
    assert b"freed memory that was not allocated" in device.library.aclGetRecentErrMsg()


def test_functions_that_need_hardware_are_refused_by_name(device):
    """The error message names the runtime function."""
    assert device.library.aclrtGone() != 0
    assert b"the null runtime has no aclrtGone" in device.library.aclGetRecentErrMsg()
