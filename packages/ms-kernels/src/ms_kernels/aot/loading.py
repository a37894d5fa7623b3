"""Loads a built library and launches its kernels, without Triton or torch.compile."""

import ctypes
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ms_kernels.aot.manifest import Kernel, Manifest, read_manifest
from ms_kernels.contracts.values import is_integer, is_number
from ms_kernels.errors import ArgumentError, BackendError, shown
from ms_kernels.files.untrusted import decoding

_TYPES = {
    "pointer": ctypes.c_void_p,
    "i32": ctypes.c_int64,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}


_RANGES = {"pointer": (0, 2**64 - 1), **dict.fromkeys(("i32", "i64"), (-(2**63), 2**63 - 1))}
"""Ranges that ctypes passes without truncation; the library itself rejects 32-bit overflow."""


class Library:
    """A loaded library with the kernels of one chip.

    Attributes:
        manifest: the library's kernels and their arguments.
    """

    def __init__(self, manifest: Manifest, handle: ctypes.CDLL) -> None:
        self.manifest = manifest
        self._handle = handle
        self._kernels: Mapping[str, Kernel] = {kernel.name: kernel for kernel in manifest.kernels}
        handle.ms_last_error.restype = ctypes.c_char_p
        handle.ms_status_text.restype = ctypes.c_char_p

    def launch(self, name: str, *, stream: int = 0, **arguments: int | float) -> None:
        """Launch one kernel on the current device.

        Args:
            name: name of a kernel in the manifest.
            stream: address of the stream, such as ``torch.cuda.current_stream().cuda_stream``.
            **arguments: all parameters of the kernel by name; pointers as addresses, such as
                ``tensor.data_ptr()``.

        Raises:
            ArgumentError: an argument is missing, unknown or not a number.
            BackendError: the library rejects the call, or the driver fails.
        """
        kernel = self._kernels.get(name)
        if kernel is None:
            some = ", ".join(list(self._kernels)[:4])
            raise BackendError(f"the library has no kernel {name!r}; it has {some}, ...")
        expected = [parameter.name for parameter in kernel.parameters]
        for argument in arguments:
            if argument not in expected:
                raise ArgumentError(
                    name, argument, "not an argument of the kernel", f"one of {expected}"
                )
        values = []
        for parameter in kernel.parameters:
            if parameter.name not in arguments:
                raise ArgumentError(name, parameter.name, "missing", f"given: {parameter.kind}")
            try:
                values.append(_number(parameter.kind, arguments[parameter.name]))
            except TypeError as error:
                got = shown(arguments[parameter.name])
                raise ArgumentError(
                    name, parameter.name, got, f"a number: {parameter.kind}"
                ) from error
        status = getattr(self._handle, f"ms_{name}")(ctypes.c_void_p(stream), *values)
        if status:
            meaning = self._handle.ms_status_text(status).decode()
            raise BackendError(f"{meaning}: {self._handle.ms_last_error().decode()}")


def load(folder: Path | str) -> Library:
    """Open a library built by `build`.

    Args:
        folder: folder of the library, such as ``lib/sm_90``.

    Raises:
        BackendError: the folder is not a library, a file differs from its checksum, or it
            cannot be opened.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest.kind != "kernels":
        raise BackendError(
            f"{folder} holds models for the CPU; open them with torch._inductor.aoti_load_package"
        )
    # Check before loading, as a shared library can run code when it is opened.
    for file in manifest.files:
        path = folder / file.path
        with decoding(path, error=BackendError):
            if not path.is_file() or path.stat().st_size != file.size_bytes:
                raise BackendError(f"{path} is missing or not {file.size_bytes} bytes; rebuild it")
            with path.open("rb") as content:
                checksum = hashlib.file_digest(content, "sha256").hexdigest()
            if checksum != file.sha256:
                raise BackendError(f"{path} differs from its checksum; rebuild it")
    library_path = folder / manifest.library
    with decoding(library_path, error=BackendError):
        handle = ctypes.CDLL(str(library_path.resolve()))
    absent = [name for name in _functions(manifest) if not hasattr(handle, name)]
    if absent:
        raise BackendError(
            f"{library_path} has no {absent[0]}, which its manifest names; rebuild it"
        )
    return Library(manifest, handle)


def _functions(manifest: Manifest) -> list[str]:
    return [
        "ms_last_error",
        "ms_status_text",
        *(f"ms_{kernel.name}" for kernel in manifest.kernels),
    ]


def _number(ctype: str, value: Any) -> Any:
    """Convert a number to its C type; ctypes alone would silently truncate it.

    Raises:
        TypeError: if the value is not in the range of the type.
    """
    lower, upper = _RANGES.get(ctype, (0, 0))
    # A float may also be infinite or NaN.
    fits = is_integer(value, lower, upper) if ctype in _RANGES else is_number(value)
    if not fits and not (ctype == "f32" and isinstance(value, float)):
        raise TypeError(ctype)
    return _TYPES[ctype](value)
