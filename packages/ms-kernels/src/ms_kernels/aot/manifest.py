"""Manifest of a library folder: typed and versioned, with checksums of all files."""

from pathlib import Path
from typing import Literal

import msgspec

from ms_kernels.errors import BackendError, shown
from ms_kernels.files.untrusted import decode_json, read_bytes

NAME = "manifest.json"

KINDS = frozenset({"pointer", "i32", "i64", "f32"})
"""Kinds of a kernel's parameters."""

MAX_BYTES = 64 * 2**20
"""Maximum size of a manifest."""


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One argument of a kernel's launch, in order."""

    name: str
    kind: str
    """``"pointer"``, ``"i32"``, ``"i64"`` or ``"f32"``; of a model the dtype of a tensor."""
    multiple_of: int = 1
    """Required divisor of the value; in bytes for a pointer."""
    taken: bool = True
    """Whether it is passed to the kernel, or used only for the launch."""


class Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kernel of a library."""

    name: str
    """The C function is named ``ms_NAME``."""
    dtype: str
    parameters: list[Parameter]
    tiles: str
    """C expression of the number of programs per launch."""
    limits: dict[str, str]
    """Maximum value of each limited argument, as a C expression."""
    constants: dict[str, int | bool | str]
    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix_instructions: int
    vector_bits: int


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """File in the library folder."""

    path: str
    size_bytes: int
    sha256: str


class Manifest(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="ms-kernels.1"
):
    """One library, for one chip."""

    target: str
    library: str
    """File name of the shared library."""
    version: str
    """Version of ms-kernels."""
    compiler: str
    """Compiler name and version."""
    kernels: list[Kernel]
    files: list[File]
    kind: Literal["kernels", "models"] = "kernels"


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest of a library.

    Raises:
        BackendError: if the manifest is missing or invalid; with the file and the reason.
    """
    path = folder / NAME
    content = read_bytes(path, error=BackendError, limit_bytes=MAX_BYTES)
    try:
        manifest = decode_json(content, Manifest, where=path, error=BackendError)
    except BackendError as error:
        reason = f"{error}: not a manifest of this version; rebuild the library"
        raise BackendError(reason) from error
    _check(manifest, path)
    return manifest


def _check(manifest: Manifest, path: Path) -> None:
    """Reject file names outside the folder, and parameters of unknown kinds."""
    listed = {file.path for file in manifest.files}
    for name in (*listed, manifest.library):
        if Path(name).is_absolute() or ".." in Path(name).parts or not name.isprintable():
            raise BackendError(f"{path} names {shown(name)}, which is not in its folder")
    if manifest.library not in listed:
        got = shown(manifest.library)
        raise BackendError(f"{path} names a library, {got}, that it does not list")
    for kernel in manifest.kernels if manifest.kind == "kernels" else ():
        for parameter in kernel.parameters:
            if parameter.kind not in KINDS:
                got = f"{shown(parameter.name)} of {shown(kernel.name)}, {shown(parameter.kind)}"
                raise BackendError(f"{path} has a parameter of unknown kind: {got}")
