"""Builds the rig's extension once for each torch, and keeps it between tests."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

__all__ = ["extension"]

SOURCE = Path(__file__).parent / "source"


@cache
def extension() -> Path:
    """The built extension; skips the test without a compiler or Python headers."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        pytest.skip("the rig needs a C++ compiler: install g++")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("the rig needs Python.h: install python3-dev")
    import torch

    text = "".join(path.read_text() for path in sorted(SOURCE.iterdir()))
    # Without torch's path: every nox session has its own torch and links to the loaded one.
    facts = (text, compiler, torch.__version__, torch.version.git_version, sys.version)
    folder = Path(tempfile.gettempdir()) / f"ms-rig-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    library = folder / name / "ms_rig_extension.so"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed
        if not library.exists():
            _build(compiler, library)
    return library


def _torch_folder() -> Path:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _build(compiler: str, library: Path) -> None:
    """Compile the sources in parallel, link them, and move the library into place atomically."""
    import torch

    library.parent.mkdir(exist_ok=True)
    headers = _torch_folder() / "include"
    options = [
        *("-std=c++20", "-O1", "-fPIC", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        "-DTORCH_EXTENSION_NAME=ms_rig_extension",
        *(f"-I{path}" for path in (headers, headers / "torch/csrc/api/include")),
        f"-I{sysconfig.get_path('include')}",
    ]

    def compile_one(path: Path) -> str:
        object_file = str(library.parent / f"{path.stem}.o")
        _call([compiler, *options, "-c", str(path), "-o", object_file])
        return object_file

    # The longest first, so that two cores end at the same time.
    sources = [SOURCE / f"{name}.cpp" for name in ("group", "operators", "device")]
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(compile_one, sources))
    libraries = [f"-L{_torch_folder() / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    temporary = library.with_suffix(".temporary")
    _call([compiler, "-shared", *parts, *libraries, "-o", str(temporary)])
    temporary.replace(library)


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
