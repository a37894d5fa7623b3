"""Manifest of a checkpoint, `checkpoint.json`, validated when read.

Tensors are in `rank-*.safetensors`, one file per rank, split into the chunks of each rank. The
manifest has the position and checksum of every chunk, so that any number of ranks can read just the
chunks they need, and every byte of every file is covered.
"""

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ms_parallel.errors import CheckpointError, DamageError
from ms_parallel.files.safetensors_file import DTYPES as NAMES
from ms_parallel.files.untrusted import check_path, decoding, read_bytes

MANIFEST = "checkpoint.json"
MANIFEST_LIMIT_BYTES = 1 << 30
FILE_NAME = re.compile(r"rank-[0-9]{5,10}\.safetensors")
DTYPES = {name: dtype for dtype, name in NAMES.items()}
"""torch dtype by safetensors name."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A box of a tensor and its bytes in a file."""

    file: str
    begin: int
    """Offset of the first byte from the start of the file."""
    size_bytes: int
    crc32: int
    offsets: tuple[int, ...]
    """Start of the box in each dim of the tensor."""
    shape: tuple[int, ...]


class SavedTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Global shape of a tensor and the chunks that fill it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class SavedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A safetensors file; its header has a separate checksum."""

    name: str
    size_bytes: int
    header_bytes: int
    header_crc32: int


class Manifest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="checkpoint.v1"
):
    """Contents of a checkpoint."""

    step: int
    """Number of steps taken."""
    tensors: dict[str, SavedTensor]
    files: tuple[SavedFile, ...]
    facts: dict[str, Any]
    """Metadata besides the tensors, as plain JSON."""

    def encode(self) -> bytes:
        """Encode the manifest with its checksum, as the content of `checkpoint.json`."""
        content = msgspec.json.encode(self)
        return msgspec.json.encode(_Sealed(crc32=zlib.crc32(content), content=msgspec.Raw(content)))


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    crc32: int
    content: msgspec.Raw


def read_manifest(folder: str | Path) -> Manifest:
    """Read and validate the manifest of a checkpoint's folder.

    Raises:
        DamageError: the file is damaged or inconsistent.
        CheckpointError: `folder` is not a path.
    """
    check_path("folder", folder, error=CheckpointError)
    path = Path(folder) / MANIFEST
    content = read_bytes(path, error=DamageError, limit_bytes=MANIFEST_LIMIT_BYTES)
    with decoding(path, error=DamageError):
        manifest = _decode(path, content)
    for problem in _contradictions(manifest):
        raise DamageError(f"{path}: {problem}")
    return manifest


def _decode(path: Path, content: bytes) -> Manifest:
    sealed = msgspec.json.decode(content, type=_Sealed)
    # `content` is raw, so the checksum is of the bytes as written.
    if zlib.crc32(sealed.content) != sealed.crc32:
        raise DamageError(f"{path}: its checksum does not match; bytes have changed on disk")
    return msgspec.json.decode(sealed.content, type=Manifest)


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield inconsistencies of a manifest; stop at the first invalid tensor or chunk."""
    files = {file.name: file for file in manifest.files}
    # Every byte of a file is in its header or in exactly one chunk, so sizes must add up.
    file_bytes = Counter({file.name: file.header_bytes for file in manifest.files})
    for name in files:
        if not FILE_NAME.fullmatch(name):
            yield f"{name!r} is not the name of a file in this folder"
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in DTYPES or any(size < 0 for size in tensor.shape):
            yield f"tensor {name!r} has dtype {tensor.dtype!r} and shape {tensor.shape}"
            return
        for chunk in tensor.chunks:
            if not _fits(chunk, tensor, files.get(chunk.file)):
                yield f"a chunk of tensor {name!r} is outside its tensor or file"
                return
            file_bytes[chunk.file] += chunk.size_bytes
        # Chunks of one tensor do not overlap, so their sizes show whether they fill it.
        if sum(math.prod(chunk.shape) for chunk in tensor.chunks) != math.prod(tensor.shape):
            yield f"the chunks of tensor {name!r} do not fill it"
    for name, file in files.items():
        if file_bytes[name] != file.size_bytes:
            yield f"the chunks in {name} do not fill it"


def _fits(chunk: Chunk, tensor: SavedTensor, file: SavedFile | None) -> bool:
    if file is None or not len(chunk.offsets) == len(chunk.shape) == len(tensor.shape):
        return False
    boxes = zip(chunk.offsets, chunk.shape, tensor.shape, strict=True)
    inside = all(
        offset >= 0 and size >= 0 and offset + size <= extent for offset, size, extent in boxes
    )
    size_bytes = math.prod(chunk.shape) * DTYPES[tensor.dtype].itemsize
    in_file = file.header_bytes <= chunk.begin and chunk.begin + size_bytes <= file.size_bytes
    return inside and in_file and chunk.size_bytes == size_bytes
