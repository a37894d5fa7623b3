"""Reads the `.metadata` of a torch.distributed.checkpoint (DCP) folder without running its code.

`.metadata` is a pickle of torch's `Metadata`. It is decoded in two passes: the first checks every
opcode, the second builds inert records in place of torch's classes. Only the names of `RECORDS` and
`PLAIN` and torch's dtypes are resolved, and never to a class or function of torch, so a malicious
file can neither call anything nor modify a class. The result is then checked against the sizes of
the folder's files.
"""

import io
import math
import os
import pickle
import pickletools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from ms_parallel.errors import DamageError
from ms_parallel.files.untrusted import open_file, read_bytes

METADATA = ".metadata"
LIMIT_BYTES = 1 << 30
FILE_NAME = re.compile(r"\w[\w.+-]{0,254}")
MAX_DIMS = 64

_CLASSES = "torch.distributed.checkpoint.metadata"
RECORDS = {
    *(
        (_CLASSES, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "BytesStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    # Megatron-Core stores the save plans of all ranks in its metadata.
    *(
        ("torch.distributed.checkpoint.planner", name)
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    ),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    # Some Python versions, such as 3.11.2, pickle a member of an enum as getattr(class, name).
    ("builtins", "getattr"),
}
"""Classes and functions that are replaced by records of their arguments."""
PLAIN: Mapping[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
}


class _Record:
    """Arguments and state of a pickled object whose class is not loaded."""

    class_name = ""

    def __init__(self, *arguments: object) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        """Return a field of the object; None if it is missing."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Unpickler(pickle.Unpickler):
    """Unpickler that resolves the names of DCP's metadata to records, and rejects all others."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        # New classes per file, so that a file cannot change classes that outlive the call.
        self.records = {
            name: type(name[1], (_Record,), {"class_name": name[1]}) for name in RECORDS
        }

    def find_class(self, module: str, name: str) -> Any:
        """Return the record class of a name, or a dtype.

        Raises:
            _InvalidError: any other name.
        """
        if (module, name) in self.records:
            return self.records[module, name]
        if (module, name) in PLAIN:
            return PLAIN[module, name]
        # isalnum: `torch.float32`, but never a dunder or a dotted path.
        dtype = getattr(torch, name, None) if module == "torch" and name.isalnum() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _InvalidError(
            f"it refers to {module[:80]}.{name[:80]}, and only checkpoint metadata is decoded"
        )


@frozen(kw_only=True)
class DcpChunk:
    """Location of an object, or of a box of a tensor, in a file."""

    file: str
    begin: int
    """Offset of the first byte in the file."""
    size_bytes: int
    offsets: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


@frozen(kw_only=True)
class DcpTensor:
    """Global shape of a tensor and the chunks that fill it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


@frozen(kw_only=True)
class DcpIndex:
    """Contents of a DCP folder."""

    tensors: Mapping[str, DcpTensor]
    objects: Mapping[str, DcpChunk]
    """Values that are not tensors, each a `torch.save` archive."""


def read_dcp_index(folder: Path) -> DcpIndex:
    """Read and check `.metadata`; every chunk is inside a file of the folder.

    Raises:
        DamageError: the file is missing or damaged, refers to anything but DCP's own classes, or
            contradicts the files of the folder.
    """
    path = folder / METADATA
    content = read_bytes(path, error=DamageError, limit_bytes=LIMIT_BYTES)
    try:
        return _index(_decode(content), _Files(folder))
    except _InvalidError as problem:
        raise DamageError(f"{path}: {problem}; use a folder that torch wrote completely") from None


class _InvalidError(Exception):
    """Invalid or contradictory metadata."""


def _decode(content: bytes) -> object:
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            # The C unpickler allocates its memo up to the highest index, so a large index in a tiny
            # file would take all memory.
            if "PUT" in opcode.name and isinstance(argument, int) and argument > count:
                raise _InvalidError("its memo is out of order")
        return _Unpickler(content).load()
    except _InvalidError:
        raise
    except (pickle.UnpicklingError, ValueError, TypeError, KeyError, IndexError) as error:
        raise _InvalidError(f"it is damaged ({type(error).__name__})") from None
    except (AttributeError, EOFError, OverflowError, MemoryError, ImportError) as error:
        raise _InvalidError(f"it is damaged ({type(error).__name__})") from None


class _Files:
    """Checks chunks against the sizes of a folder's files, which are cached."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sizes: dict[str, int] = {}

    def chunk(self, name: str, record: object, offsets: Any = (), shape: Any = ()) -> DcpChunk:
        """Validate and return the chunk of a tensor or object."""
        if not isinstance(record, _Record) or record.class_name != "_StorageInfo":
            raise _InvalidError(f"it does not say where {name[:80]!r} is stored")
        if record.field("transform_descriptors"):
            raise _InvalidError(f"{name[:80]!r} is compressed, which is not supported")
        # FILE_NAME has no separators, so a chunk cannot point outside the folder.
        file, begin, size = (record.field(f) for f in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
            raise _InvalidError(f"{str(file)[:80]!r} is not the name of a file in this folder")
        if not _sizes_of((begin, size)):
            raise _InvalidError(f"{name[:80]!r} has an invalid position in {file}")
        if begin + size > self._size(file):
            raise _InvalidError(
                f"{name[:80]!r} ends at byte {begin + size} of {file}, which has "
                f"{self._size(file)} bytes"
            )
        return DcpChunk(
            file=file,
            begin=begin,
            size_bytes=size,
            offsets=tuple(offsets),
            shape=tuple(shape),
        )

    def _size(self, file: str) -> int:
        if file not in self._sizes:
            try:
                with open_file(self.folder / file, error=DamageError) as stream:
                    self._sizes[file] = os.fstat(stream.fileno()).st_size
            except OSError as error:
                raise _InvalidError(f"{file} cannot be read: {error.strerror or error}") from None
        return self._sizes[file]


def _index(metadata: object, files: _Files) -> DcpIndex:
    """Convert the decoded metadata; reject contradictions within it or with the files."""
    if not isinstance(metadata, _Record) or metadata.class_name != "Metadata":
        raise _InvalidError("it is not the metadata of a checkpoint")
    entries, storage = metadata.field("state_dict_metadata"), metadata.field("storage_data")
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise _InvalidError("it lists no tensors")
    # Location by name and offsets of the chunk; the offsets of an object are None.
    locations: dict[tuple[str, tuple[int, ...] | None], object] = {}
    for index, location in storage.items():
        if not isinstance(index, _Record) or index.class_name != "MetadataIndex":
            raise _InvalidError("it has an invalid index")
        name, offset = index.field("fqn"), index.field("offset")
        if not isinstance(name, str) or not (offset is None or _sizes_of(offset)):
            raise _InvalidError("it has an invalid index")
        locations[name, offset] = location
    tensors: dict[str, DcpTensor] = {}
    objects: dict[str, DcpChunk] = {}
    for name, entry in entries.items():
        entry_class = entry.class_name if isinstance(entry, _Record) else None
        if not isinstance(name, str) or entry_class not in (
            "TensorStorageMetadata",
            "BytesStorageMetadata",
        ):
            raise _InvalidError(f"{str(name)[:80]!r} is neither a tensor nor an object")
        if entry_class == "TensorStorageMetadata":
            tensors[name] = _tensor(name, entry, locations, files)
        else:
            objects[name] = files.chunk(name, locations.get((name, None)))
    return DcpIndex(tensors=tensors, objects=objects)


def _tensor(
    name: str,
    entry: _Record,
    locations: Mapping[tuple[str, tuple[int, ...] | None], object],
    files: _Files,
) -> DcpTensor:
    properties, shape, chunks = (entry.field(f) for f in ("properties", "size", "chunks"))
    state = getattr(properties, "state", None)
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype) or not _sizes_of(shape) or not isinstance(chunks, list):
        raise _InvalidError(f"tensor {name[:80]!r} has no valid shape and dtype")
    checked = []
    for chunk in chunks:
        offsets: Any = chunk.field("offsets") if isinstance(chunk, _Record) else None
        sizes: Any = chunk.field("sizes") if isinstance(chunk, _Record) else None
        if (
            not _sizes_of(offsets)
            or not _sizes_of(sizes)
            or not len(offsets) == len(sizes) == len(shape)
            or any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True))
        ):
            raise _InvalidError(f"a chunk of tensor {name[:80]!r} is outside its tensor")
        if 0 in sizes:  # shards of small tensors are empty on some ranks
            continue
        checked.append(files.chunk(name, locations.get((name, offsets)), offsets, sizes))
        if math.prod(sizes) * dtype.itemsize > checked[-1].size_bytes:
            raise _InvalidError(f"a chunk of tensor {name[:80]!r} is larger than its bytes on disk")
    # Only sizes here. `DcpFolder.read` detects overlaps, which leave gaps.
    if sum(math.prod(chunk.shape) for chunk in checked) != math.prod(shape):
        raise _InvalidError(f"the chunks of tensor {name[:80]!r} do not fill it")
    return DcpTensor(dtype=dtype, shape=shape, chunks=tuple(checked))


def _sizes_of(value: object) -> bool:
    """Return True if a value is a short tuple of integers from 0 to 2^63."""
    return (
        isinstance(value, tuple)
        and len(value) <= MAX_DIMS
        and all(type(size) is int and 0 <= size < 1 << 63 for size in value)
    )
