"""Megatron's indexed datasets: PREFIX.bin holds the tokens, PREFIX.idx where each sequence lies.

The index is, little endian: a magic of 9 bytes, the version (u64, 1), the code of the tokens' type
(u8), how many sequences and bounds of documents there are (u64 each), the length of each sequence
(i32), the byte at which it begins (i64), and the bounds of documents in sequences (i64). Multimodal
ones end with a mode a sequence, and are refused.
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
"""Megatron writes tokens of smaller vocabularies as uint16, others as int32."""


class MegatronReader:
    """The documents of an indexed dataset, checked against the files' sizes when it is opened.

    Args:
        path: PREFIX.idx, PREFIX.bin or PREFIX.

    Raises:
        CorpusError: a file is missing, damaged, or of a kind that holds no text.
    """

    def __init__(self, path: Path) -> None:
        prefix = path.with_suffix("") if path.suffix in (".idx", ".bin") else path
        self.index, self.tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        try:
            with open_file(self.index, error=CorpusError) as file:
                content = file.readall()
            check_file(self.tokens, error=CorpusError)
            size = self.tokens.stat().st_size
        except OSError as error:
            raise CorpusError(
                f"{printable(error.filename)} cannot be read: {error.strerror}; give PREFIX.idx "
                "with PREFIX.bin beside it"
            ) from error
        self._read_index(content, size)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tokens."""
        return int(self._lengths.sum(dtype=np.int64)) * self._kind.itemsize

    def documents(self) -> Iterator[tuple[str, NDArray[np.integer]]]:
        """Yield each document's place and tokens, shape (n,)."""
        if not self.tokens.stat().st_size:
            return
        mapped = np.memmap(self.tokens, np.uint8, "r")
        for number, (first, last) in enumerate(pairwise(self._bounds.tolist())):
            parts = [
                mapped[begin : begin + length * self._kind.itemsize].view(self._kind)
                for begin, length in zip(
                    self._begins[first:last].tolist(),
                    self._lengths[first:last].tolist(),
                    strict=True,
                )
            ]
            none = np.zeros(0, self._kind)  # a document may have no sequence
            yield f"document {number} of {self.tokens}", np.concatenate([none, *parts])

    def _read_index(self, content: bytes, size: int) -> None:
        head = len(_MAGIC) + _HEAD.size
        if len(content) < head or content[: len(_MAGIC)] != _MAGIC:
            raise self._damage("it does not begin as an index of Megatron's does")
        version, code, sequences, bounds = _HEAD.unpack(content[len(_MAGIC) : head])
        if version != 1:
            raise self._damage(f"it is of version {version}, not 1")
        if code in _FLOATS:
            raise self._damage(f"it holds {_FLOATS[code]}, which are no tokens")
        if code not in _TYPES:
            raise self._damage(f"its tokens are of an unknown type, {code}")
        expected = head + 12 * sequences + 8 * bounds
        if len(content) == expected + sequences > expected:
            raise self._damage("it is multimodal, with a mode for each sequence")
        if len(content) != expected:
            raise self._damage(f"it has {len(content)} bytes where it says {expected}")
        self._kind = np.dtype(_TYPES[code])
        self._lengths = np.frombuffer(content, "<i4", sequences, head)
        self._begins = np.frombuffer(content, "<i8", sequences, head + 4 * sequences)
        self._bounds = np.frombuffer(content, "<i8", bounds, head + 12 * sequences)
        if (self._lengths < 0).any() or (self._begins < 0).any():
            raise self._damage("a sequence has a length or a place below 0")
        if (self._begins > size - self._lengths.astype(np.int64) * self._kind.itemsize).any():
            raise self._damage(f"a sequence ends beyond the {size} bytes of {self.tokens.name}")
        ordered = bounds > 0 and self._bounds[0] == 0 and self._bounds[-1] == sequences
        if not ordered or (np.diff(self._bounds) < 0).any():
            raise self._damage("its documents do not cover its sequences in order")

    def _damage(self, problem: str) -> CorpusError:
        return CorpusError(f"{printable(self.index)}: {problem}; fetch or write it again")


def write_megatron(
    prefix: Path,
    documents: Iterator[NDArray[np.unsignedinteger]],
    lengths: Sequence[int],
    *,
    vocabulary_size: int,
) -> int:
    """Write documents of these lengths, a sequence each; return the bytes of both files.

    The index lies aside while the tokens are written, so that `interrupted` tells them from a
    file of something else.

    Raises:
        WriteError: the disk is full, or the place cannot be written.
    """
    code = _UINT16 if vocabulary_size < _NARROW_VOCABULARY else _INT32
    kind = np.dtype(_TYPES[code])
    sizes = np.array(lengths, "<i4")
    begins = np.cumsum(sizes, dtype="<i8") - sizes
    bounds = np.arange(len(sizes) + 1, dtype="<i8")
    index = _MAGIC + _HEAD.pack(1, code, len(sizes), len(bounds))
    index += sizes.tobytes() + (begins * kind.itemsize).astype("<i8").tobytes() + bounds.tobytes()
    tokens = Path(f"{prefix}.bin")

    def write(file: BinaryIO) -> None:
        file.writelines(document.astype(kind).tobytes() for document in documents)

    path, aside = Path(f"{prefix}.idx"), _index_aside(prefix)
    try:
        with writing(path):
            aside.unlink(missing_ok=True)
            write_synced(aside, index)
            sync_folder(aside.parent)
        replace(tokens, write)
        with writing(path):
            publish(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
    return len(index) + os.path.getsize(tokens)


def interrupted(prefix: Path) -> bool:
    """Return whether `write_megatron` was killed between the two names of a pair."""
    return _index_aside(prefix).exists() and not os.path.lexists(f"{prefix}.idx")


def _index_aside(prefix: Path) -> Path:
    return Path(f"{prefix}.idx.partial")
