"""MosaicML's MDS: a folder with index.json and shards of rows, plain or packed.

A shard is: how many rows it has (u32), the byte at which each begins and the last one ends (u32
each), a header of JSON, and the rows. A row is the sizes (u32) of those of its columns that have
no fixed one, and the columns' bytes.
"""

import gzip
import hashlib
import io
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from ms_data.errors import CorpusError, printable
from ms_data.files.untrusted import decode_json, read_bytes

LARGEST_SHARD_BYTES = 1 << 31
_TOKENS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")

Value: TypeAlias = str | NDArray[np.integer]


class _File(msgspec.Struct, frozen=True):
    basename: str
    bytes: int
    hashes: dict[str, str] = {}


class _Shard(msgspec.Struct, frozen=True):
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    format: str
    raw_data: _File
    samples: int
    compression: str | None = None
    zip_data: _File | None = None


class _Index(msgspec.Struct, frozen=True):
    shards: list[_Shard]
    version: int = 2


class MdsReader:
    """The rows of one column of a folder of MDS.

    Args:
        folder: with `index.json`.
        column: its name.

    Raises:
        CorpusError: the index is missing or damaged, or there is no such column, or it holds what
            is neither text nor tokens.
    """

    def __init__(self, folder: Path, column: str) -> None:
        self._folder, self._column = folder, column
        path = folder / "index.json"
        content = read_bytes(path, error=CorpusError, limit_bytes=1 << 28)
        self._shards = decode_json(content, _Index, where=path, error=CorpusError).shards
        for shard in self._shards:
            self._check(shard)

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards, unpacked."""
        return sum(shard.raw_data.bytes for shard in self._shards)

    def documents(self) -> Iterator[tuple[str, Value]]:
        """Yield each row's place and text, or tokens of shape (n,).

        Raises:
            CorpusError: a shard is missing or damaged.
        """
        for shard in self._shards:
            content = self._read(shard)
            at = shard.column_names.index(self._column)
            encoding = shard.column_encodings[at]
            for number, row in enumerate(self._rows(shard, content)):
                place = f"row {number} of {self._folder / shard.raw_data.basename}"
                yield place, self._value(encoding, self._cell(shard, row, at), place)

    def _check(self, shard: _Shard) -> None:
        files = [shard.raw_data, *([shard.zip_data] if shard.zip_data else [])]
        for file in files:
            if Path(file.basename).name != file.basename or file.basename in ("", ".", ".."):
                raise self._damage(f"names the file {file.basename!r}, which may lie elsewhere")
            if not 0 <= file.bytes <= LARGEST_SHARD_BYTES:
                raise self._damage(f"says a shard of {file.bytes} bytes")
        lengths = {len(shard.column_names), len(shard.column_encodings), len(shard.column_sizes)}
        if shard.format != "mds" or len(lengths) != 1:
            raise self._damage(f"holds a shard that is {shard.format!r}, not mds")
        if self._column not in shard.column_names:
            have = ", ".join(map(repr, shard.column_names))
            raise CorpusError(
                f"{printable(self._folder)} has no column {self._column!r}; name one of {have} "
                "with --column"
            )
        encoding = shard.column_encodings[shard.column_names.index(self._column)]
        kind, _, rest = encoding.partition(":")
        tokens = kind == "ndarray" and rest.split(":")[0] in _TOKENS and ":" in rest
        if encoding not in ("str", "bytes") and not tokens:
            raise CorpusError(
                f"{printable(self._folder)}: the column {self._column!r} is {encoding!r}; text is "
                "'str', and tokens are 'bytes' of int64 or 'ndarray' with a type and a shape"
            )

    def _read(self, shard: _Shard) -> bytes:
        """The bytes of a shard, unpacked and checked."""
        packed = shard.zip_data
        plain = self._folder / shard.raw_data.basename
        if packed is None or plain.is_file():
            content = self._checked(shard.raw_data)
        else:
            content = self._unpacked(shard, self._checked(packed))
        if len(content) != shard.raw_data.bytes:
            raise self._damage(f"{plain.name} has {len(content)} bytes, not those it should have")
        return content

    def _checked(self, file: _File) -> bytes:
        path = self._folder / file.basename
        content = read_bytes(path, error=CorpusError, limit_bytes=LARGEST_SHARD_BYTES)
        for name, expected in file.hashes.items():
            if name in hashlib.algorithms_guaranteed:
                found = hashlib.new(name, content).hexdigest()
            elif name in ("xxh64", "xxh32", "xxh3_64", "xxh3_128"):
                found = getattr(xxhash, name)(content).hexdigest()
            else:
                continue
            if found != expected:
                raise self._damage(f"{file.basename} does not have the {name} it should have")
        return content

    def _unpacked(self, shard: _Shard, content: bytes) -> bytes:
        kind, most = str(shard.compression).partition(":")[0], shard.raw_data.bytes + 1
        try:
            if kind in ("zstd", "zstandard"):
                stream = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(content))
                return stream.read(most)
            if kind == "gz":
                return gzip.GzipFile(fileobj=io.BytesIO(content)).read(most)
        except (zstandard.ZstdError, OSError, EOFError) as error:
            raise self._damage(f"{shard.raw_data.basename} cannot be unpacked: {error}") from error
        raise self._damage(f"its shards are packed by {kind}; unpack them first")

    def _rows(self, shard: _Shard, content: bytes) -> Iterator[bytes]:
        count = int.from_bytes(content[:4], "little")
        if count != shard.samples or len(content) < 4 * (count + 2):
            raise self._damage(f"{shard.raw_data.basename} has {count} rows, not {shard.samples}")
        bounds = np.frombuffer(content, "<u4", count + 1, 4).tolist()
        if sorted(bounds) != bounds or bounds[0] < 4 * (count + 2) or bounds[-1] > len(content):
            raise self._damage(f"the rows of {shard.raw_data.basename} lie outside it")
        for begin, end in pairwise(bounds):
            yield content[begin:end]

    def _cell(self, shard: _Shard, row: bytes, wanted: int) -> bytes:
        sizes = shard.column_sizes
        begin = 4 * sum(size is None for size in sizes)
        given = iter(np.frombuffer(row[:begin], "<u4").tolist() if len(row) >= begin else [])
        for at, fixed in enumerate(sizes):
            size = next(given, None) if fixed is None else fixed
            if size is None or size < 0 or begin + size > len(row):
                raise self._damage(f"a row of {shard.raw_data.basename} is too short")
            if at == wanted:
                return row[begin : begin + size]
            begin += size
        raise AssertionError(wanted)

    def _value(self, encoding: str, cell: bytes, place: str) -> Value:
        kind: Any = "<i8" if encoding == "bytes" else encoding.split(":")[1:2]
        try:
            if encoding == "str":
                return cell.decode()
            dtype = np.dtype(kind if isinstance(kind, str) else kind[0]).newbyteorder("<")
            return np.frombuffer(cell, dtype)
        except ValueError as error:
            raise CorpusError(f"{printable(place)}: {error}; write it again") from error

    def _damage(self, problem: str) -> CorpusError:
        return CorpusError(
            f"{printable(self._folder / 'index.json')}: {printable(problem)}; fetch it again"
        )
