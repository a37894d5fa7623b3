"""The list of what a library's folder holds: typed, versioned, checksummed."""

from pathlib import Path
from typing import Literal

import msgspec

from ms_kernels.errors import BackendError, shown
from ms_kernels.files.untrusted import decode_json, read_bytes

NAME = "manifest.json"

KINDS = frozenset({"pointer", "i32", "i64", "f32"})
"""Kinds of a kernel's parameters."""

LARGEST_BYTES = 64 * 2**20
"""Largest size of a manifest."""


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One argument of a kernel's launch, in order."""

    name: str
    kind: str
    """``"pointer"``, ``"i32"``, ``"i64"`` or ``"f32"``; of a model the dtype of a tensor."""
    multiple_of: int = 1
    """What its value is a multiple of; in bytes for a pointer."""
    taken: bool = True
    """Whether the kernel takes it, or the launch alone."""


class Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kernel of a library."""

    name: str
    """The C function is ``ms_`` and this."""
    dtype: str
    parameters: list[Parameter]
    tiles: str
    """How many programs a launch takes."""
    limits: dict[str, str]
    """What an argument may be at most."""
    constants: dict[str, int | bool | str]
    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix_instructions: int
    vector_bits: int


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the folder."""

    path: str
    size_bytes: int
    sha256: str


class Manifest(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="ms-kernels.1"
):
    """One library, for one chip."""

    target: str
    library: str
    """The shared library's file."""
    version: str
    """Version of ms-kernels."""
    compiler: str
    """What made the code, with its version."""
    kernels: list[Kernel]
    files: list[File]
    kind: Literal["kernels", "models"] = "kernels"


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest of a library.

    Raises:
        BackendError: when there is none, or it is not one; says which file and why.
    """
    path = folder / NAME
    content = read_bytes(path, error=BackendError, limit_bytes=LARGEST_BYTES)
    try:
        manifest = decode_json(content, Manifest, where=path, error=BackendError)
    except BackendError as error:
        reason = f"{error}: no manifest of this version; build the library again"
        raise BackendError(reason) from error
    _check(manifest, path)
    return manifest


def _check(manifest: Manifest, path: Path) -> None:
    """Refuse names that lead out of the folder, or that no library has."""
    listed = {each.path for each in manifest.files}
    for name in (*listed, manifest.library):
        if Path(name).is_absolute() or ".." in Path(name).parts or not name.isprintable():
            raise BackendError(f"{path} names {shown(name)}, which is no file of its folder")
    if manifest.library not in listed:
        got = shown(manifest.library)
        raise BackendError(f"{path} names a library, {got}, that it does not list")
    for kernel in manifest.kernels if manifest.kind == "kernels" else ():
        for each in kernel.parameters:
            if each.kind not in KINDS:
                got = f"{shown(each.name)} of {shown(kernel.name)}, {shown(each.kind)}"
                raise BackendError(f"{path} has a parameter of no known kind: {got}")
