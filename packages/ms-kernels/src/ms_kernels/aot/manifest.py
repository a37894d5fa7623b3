"""What stands in a library's folder: a typed, versioned, checksummed list."""

from pathlib import Path
from typing import Literal

import msgspec

from ms_kernels.errors import BackendError

__all__ = ["NAME", "File", "Kernel", "Manifest", "Parameter", "read_manifest"]

NAME = "manifest.json"

LARGEST_BYTES = 64 * 2**20
"""Of a manifest; a larger one is no manifest."""


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One argument of a kernel's launch, in order."""

    name: str
    kind: str
    """``"pointer"``, ``"i32"``, ``"i64"`` or ``"f32"``."""
    multiple_of: int = 1
    """Of bytes, for a pointer's address."""
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
    """Of ms-kernels."""
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
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise BackendError(f"{path} is larger than any manifest; build the library again")
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise BackendError(f"{folder} holds no library: there is no {NAME}") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise BackendError(f"{path} is no manifest of this version: {error}") from error
    listed = {each.path for each in manifest.files}
    for name in (*listed, manifest.library):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise BackendError(f"{path} names {name!r}, outside its folder")
    if manifest.library not in listed:
        raise BackendError(f"{path} names a library, {manifest.library!r}, that it does not list")
    return manifest
