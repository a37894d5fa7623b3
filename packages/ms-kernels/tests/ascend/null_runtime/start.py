"""Load the null runtime instead of CANN in this process."""

import ctypes
import importlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

from .bridge import attach
from .errors import NullRuntimeError
from .stubs import LIBRARIES, build
from .symbols import names_of

__all__ = ["start"]


def start(folder: Path | None = None) -> None:
    """Build the stub libraries, load them and import torch_npu; then ``npu:0`` is a device.

    `import torch` would import torch_npu automatically and find no CANN, so set the variable
    ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` before Python starts. torch_npu's task queue is disabled so
    that errors are raised by the call that causes them. Its memory cache is disabled so that every
    tensor has its own allocation, which starts as NaN and whose bounds are checked.

    Args:
        folder: folder for the stubs; a temporary one if None.

    Raises:
        NullRuntimeError: when torch_npu is absent or already imported, or there is no compiler.
    """
    if "torch_npu" in sys.modules:
        raise NullRuntimeError("torch_npu is imported already; start the null runtime before it")
    os.environ |= {"TASK_QUEUE_ENABLE": "0", "PYTORCH_NO_NPU_MEMORY_CACHING": "1"}
    wheel, torch_folder = _folder_of("torch_npu"), _folder_of("torch")
    if folder is not None:
        _load(folder, wheel, torch_folder)
        return
    with tempfile.TemporaryDirectory(prefix="null-runtime-") as temporary:
        _load(Path(temporary), wheel, torch_folder)


def _load(folder: Path, wheel: Path, torch_folder: Path) -> None:
    main = build(folder.absolute(), names_of(wheel, torch_folder))
    # A loaded library is found by its soname, so no search path is needed.
    library = ctypes.CDLL(str(main), ctypes.RTLD_GLOBAL)
    for name in LIBRARIES:
        ctypes.CDLL(str(main.with_name(name)), ctypes.RTLD_GLOBAL)
    attach(library)
    importlib.import_module("torch_npu")


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise NullRuntimeError(
            f"{package} is not installed; "
            "pip install torch==2.13.0 numpy pyyaml, then pip install --no-deps torch_npu==2.13.0"
        )
    return Path(spec.submodule_search_locations[0])
