"""Megatron's indexed datasets: PREFIX.bin holds the tokens, PREFIX.idx the sequence positions.

The index consists, in little endian, of 9 magic bytes, the version (u64, 1), the code of the token
type (u8), the numbers of sequences and of document bounds (u64 each), the length of every sequence
(i32), its byte offset (i64), and the document bounds, counted in sequences (i64). Multimodal
datasets end with one mode per sequence, and are rejected.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ms_data.errors import CorpusError, printable
from ms_data.files.durable import publish, replace, sync_folder, write_synced, writing
from ms_data.files.untrusted import check_file, open_file

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<QBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}
_UINT16, _INT32 = 8, 4
_NARROW_VOCABULARY = 65500
"""Megatron stores tokens of smaller vocabularies as uint16, others as int32."""


class MegatronReader:
    """Reads the documents of an indexed dataset; file sizes are checked on opening.

    Args:
        path: PREFIX.idx, PREFIX.bin or PREFIX.

    Raises:
        CorpusError: a file is missing or damaged, or the dataset is not text.
    """

    def __init__(self, path: Path) -> None:
        named = path.suffix.lower() in (".idx", ".bin")
        prefix = path.with_suffix("") if named else path
        # A copy from another file system may have its names in capitals.
        suffixes = (".IDX", ".BIN") if named and path.suffix.isupper() else (".idx", ".bin")
        self.index, self.tokens = (Path(f"{prefix}{suffix}") for suffix in suffixes)
        try:
            with open_file(self.index, error=CorpusError) as file:
                content = file.readall()
            check_file(self.tokens, error=CorpusError)
            size = self.tokens.stat().st_size
        except OSError as error:
            raise CorpusError(
                f"{printable(error.filename)} cannot be read: {error.strerror}; pass PREFIX.idx, "
                "with PREFIX.bin in the same folder"
            ) from error
        self._read_index(content, size)

    @property
    def size_bytes(self) -> int:
        """Size of all tokens in bytes."""
        return int(self._lengths.sum(dtype=np.int64)) * self._dtype.itemsize

    def documents(self) -> Iterator[tuple[str, NDArray[np.integer]]]:
        """Yield location and tokens, shape (n,), of every document."""
        if not self.tokens.stat().st_size:
            return
        mapped = np.memmap(self.tokens, np.uint8, "r")
        for number, (first, last) in enumerate(pairwise(self._bounds.tolist())):
            parts = [
                mapped[begin : begin + length * self._dtype.itemsize].view(self._dtype)
                for begin, length in zip(
                    self._begins[first:last].tolist(),
                    self._lengths[first:last].tolist(),
                    strict=True,
                )
            ]
            empty = np.zeros(0, self._dtype)  # a document may have no sequences
            yield f"document {number} of {self.tokens}", np.concatenate([empty, *parts])

    def _read_index(self, content: bytes, size: int) -> None:
        head = len(_MAGIC) + _HEAD.size
        if len(content) < head or content[: len(_MAGIC)] != _MAGIC:
            raise self._damage_error("not a Megatron index")
        version, code, sequences, bounds = _HEAD.unpack(content[len(_MAGIC) : head])
        if version != 1:
            raise self._damage_error(f"version {version}, not 1")
        if code in _FLOATS:
            raise self._damage_error(f"it holds {_FLOATS[code]}, not tokens")
        if code not in _TYPES:
            raise self._damage_error(f"the tokens have the unknown type {code}")
        expected = head + 12 * sequences + 8 * bounds  # i32 lengths, i64 offsets, i64 bounds
        if len(content) == expected + sequences > expected:
            raise self._damage_error("it is multimodal, with a mode for each sequence")
        if len(content) != expected:
            raise self._damage_error(f"it has {len(content)} bytes, not {expected}")
        self._dtype = np.dtype(_TYPES[code])
        self._lengths = np.frombuffer(content, "<i4", sequences, head)
        self._begins = np.frombuffer(content, "<i8", sequences, head + 4 * sequences)
        self._bounds = np.frombuffer(content, "<i8", bounds, head + 12 * sequences)
        if (self._lengths < 0).any() or (self._begins < 0).any():
            raise self._damage_error("a sequence has a negative length or offset")
        if (self._begins > size - self._lengths.astype(np.int64) * self._dtype.itemsize).any():
            raise self._damage_error(
                f"a sequence ends after the {size} bytes of {self.tokens.name}"
            )
        ordered = bounds > 0 and self._bounds[0] == 0 and self._bounds[-1] == sequences
        if not ordered or (np.diff(self._bounds) < 0).any():
            raise self._damage_error("the documents do not cover the sequences in order")

    def _damage_error(self, problem: str) -> CorpusError:
        return CorpusError(f"{printable(self.index)}: {problem}; download or write it again")


def write_megatron(
    prefix: Path,
    documents: Iterator[NDArray[np.unsignedinteger]],
    lengths: Sequence[int],
    *,
    vocabulary_size: int,
) -> int:
    """Write documents of the given lengths, one sequence each; return the size of both files.

    While the tokens are written, the index has a temporary name, by which `was_interrupted`
    recognizes an unfinished pair.

    Raises:
        WriteError: the disk is full, or a file cannot be written.
    """
    code = _UINT16 if vocabulary_size < _NARROW_VOCABULARY else _INT32
    dtype = np.dtype(_TYPES[code])
    sizes = np.array(lengths, "<i4")  # (sequences,) tokens
    begins = np.cumsum(sizes, dtype="<i8") - sizes  # (sequences,) offsets in tokens
    bounds = np.arange(len(sizes) + 1, dtype="<i8")
    index = _MAGIC + _HEAD.pack(1, code, len(sizes), len(bounds))
    index += sizes.tobytes() + (begins * dtype.itemsize).astype("<i8").tobytes() + bounds.tobytes()
    tokens = Path(f"{prefix}.bin")

    def write(file: BinaryIO) -> None:
        file.writelines(document.astype(dtype).tobytes() for document in documents)

    path, partial_index = Path(f"{prefix}.idx"), _partial_index(prefix)
    try:
        with writing(path):
            partial_index.unlink(missing_ok=True)
            write_synced(partial_index, index)
            sync_folder(partial_index.parent)
        replace(tokens, write)
        with writing(path):
            publish(partial_index, path)
    except BaseException:
        with suppress(OSError):
            partial_index.unlink()
        raise
    return len(index) + os.path.getsize(tokens)


def was_interrupted(prefix: Path) -> bool:
    """Return whether `write_megatron` was killed before it gave the index its final name."""
    return _partial_index(prefix).exists() and not os.path.lexists(f"{prefix}.idx")


def _partial_index(prefix: Path) -> Path:
    return Path(f"{prefix}.idx.partial")
