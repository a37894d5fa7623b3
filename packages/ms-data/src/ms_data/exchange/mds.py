"""MosaicML's MDS format: a folder with index.json and shards of rows, optionally compressed.

A shard consists of the number of rows (u32), the offset of every row and of the end (u32 each), a
JSON header, and the rows. A row consists of the sizes (u32) of its variable-size columns, and the
bytes of all columns.
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

MAX_SHARD_BYTES = 1 << 31
_TOKENS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")

Value: TypeAlias = str | NDArray[np.integer]


class _File(msgspec.Struct, frozen=True):
    basename: str
    bytes: int
    hashes: dict[str, str] = {}


class _MdsShard(msgspec.Struct, frozen=True):
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    format: str
    raw_data: _File
    samples: int
    compression: str | None = None
    zip_data: _File | None = None


class _MdsIndex(msgspec.Struct, frozen=True):
    shards: list[_MdsShard]
    version: int = 2


class MdsReader:
    """Reads one column of an MDS folder.

    Args:
        folder: folder with `index.json`.
        column: name of the column.

    Raises:
        CorpusError: the index is missing or damaged, or the column is missing or is neither text
            nor tokens.
    """

    def __init__(self, folder: Path, column: str) -> None:
        self._folder, self._column = folder, column
        path = folder / "index.json"
        content = read_bytes(path, error=CorpusError, limit_bytes=1 << 28)
        self._shards = decode_json(content, _MdsIndex, where=path, error=CorpusError).shards
        for shard in self._shards:
            self._check(shard)

    @property
    def size_bytes(self) -> int:
        """Uncompressed size of all shards."""
        return sum(shard.raw_data.bytes for shard in self._shards)

    def documents(self) -> Iterator[tuple[str, Value]]:
        """Yield location and text, or tokens of shape (n,), of every row.

        Raises:
            CorpusError: a shard is missing or damaged.
        """
        for shard in self._shards:
            content = self._read(shard)
            column_index = shard.column_names.index(self._column)
            encoding = shard.column_encodings[column_index]
            for number, row in enumerate(self._rows(shard, content)):
                location = f"row {number} of {self._folder / shard.raw_data.basename}"
                yield (
                    location,
                    self._value(encoding, self._cell(shard, row, column_index), location),
                )

    def _check(self, shard: _MdsShard) -> None:
        files = [shard.raw_data, *([shard.zip_data] if shard.zip_data else [])]
        for file in files:
            # An index must not make us read files outside its folder.
            if Path(file.basename).name != file.basename or file.basename in ("", ".", ".."):
                raise self._damage_error(f"names the file {file.basename!r}, not a plain file name")
            if not 0 <= file.bytes <= MAX_SHARD_BYTES:
                raise self._damage_error(f"declares a shard of {file.bytes} bytes")
        lengths = {len(shard.column_names), len(shard.column_encodings), len(shard.column_sizes)}
        if shard.format != "mds" or len(lengths) != 1:
            raise self._damage_error(f"lists a shard of format {shard.format!r}, not mds")
        if self._column not in shard.column_names:
            have = ", ".join(map(repr, shard.column_names))
            raise CorpusError(
                f"{printable(self._folder)} has no column {self._column!r}; use one of {have} "
                "with --column"
            )
        encoding = shard.column_encodings[shard.column_names.index(self._column)]
        name, _, parameters = encoding.partition(":")
        is_tokens = name == "ndarray" and parameters.split(":")[0] in _TOKENS and ":" in parameters
        if encoding not in ("str", "bytes") and not is_tokens:
            raise CorpusError(
                f"{printable(self._folder)}: column {self._column!r} is encoded as {encoding!r}; "
                "use 'str' for text, or 'bytes' of int64 or 'ndarray' with type and shape"
            )

    def _read(self, shard: _MdsShard) -> bytes:
        """Return the decompressed content of a shard after checking it."""
        compressed = shard.zip_data
        plain = self._folder / shard.raw_data.basename
        # Some tools leave the decompressed shard next to the compressed one.
        if compressed is None or plain.is_file():
            content = self._read_verified(shard.raw_data)
        else:
            content = self._decompress(shard, self._read_verified(compressed))
        if len(content) != shard.raw_data.bytes:
            raise self._damage_error(
                f"{plain.name} has {len(content)} bytes, not {shard.raw_data.bytes}"
            )
        return content

    def _read_verified(self, file: _File) -> bytes:
        path = self._folder / file.basename
        content = read_bytes(path, error=CorpusError, limit_bytes=MAX_SHARD_BYTES)
        for name, expected in file.hashes.items():
            if name in hashlib.algorithms_guaranteed:
                actual = hashlib.new(name, content).hexdigest()
            elif name in ("xxh64", "xxh32", "xxh3_64", "xxh3_128"):
                actual = getattr(xxhash, name)(content).hexdigest()
            else:
                continue
            if actual != expected:
                raise self._damage_error(f"{file.basename} has the wrong {name} checksum")
        return content

    def _decompress(self, shard: _MdsShard, content: bytes) -> bytes:
        # Read at most one byte more than declared, so a bomb is noticed early.
        algorithm, size_limit = str(shard.compression).partition(":")[0], shard.raw_data.bytes + 1
        try:
            if algorithm in ("zstd", "zstandard"):
                stream = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(content))
                return stream.read(size_limit)
            if algorithm == "gz":
                return gzip.GzipFile(fileobj=io.BytesIO(content)).read(size_limit)
        except (zstandard.ZstdError, OSError, EOFError) as error:
            raise self._damage_error(
                f"{shard.raw_data.basename} cannot be decompressed: {error}"
            ) from error
        raise self._damage_error(
            f"its shards are compressed with {algorithm}; decompress them first"
        )

    def _rows(self, shard: _MdsShard, content: bytes) -> Iterator[bytes]:
        count = int.from_bytes(content[:4], "little")
        if count != shard.samples or len(content) < 4 * (count + 2):  # u32: count, offsets, end
            raise self._damage_error(
                f"{shard.raw_data.basename} has {count} rows, not {shard.samples}"
            )
        # Start of every row, and the end.
        bounds = np.frombuffer(content, "<u4", count + 1, 4).tolist()
        if sorted(bounds) != bounds or bounds[0] < 4 * (count + 2) or bounds[-1] > len(content):
            raise self._damage_error(f"rows of {shard.raw_data.basename} are outside the file")
        for begin, end in pairwise(bounds):
            yield content[begin:end]

    def _cell(self, shard: _MdsShard, row: bytes, column: int) -> bytes:
        sizes = shard.column_sizes
        # The row starts with the u32 sizes of its variable-size columns.
        begin = 4 * sum(size is None for size in sizes)
        variable = iter(np.frombuffer(row[:begin], "<u4").tolist() if len(row) >= begin else [])
        for index, fixed in enumerate(sizes):
            size = next(variable, None) if fixed is None else fixed
            if size is None or size < 0 or begin + size > len(row):
                raise self._damage_error(f"a row of {shard.raw_data.basename} is too short")
            if index == column:
                return row[begin : begin + size]
            begin += size
        raise AssertionError(column)

    def _value(self, encoding: str, cell: bytes, location: str) -> Value:
        # Tokens in `bytes` are int64 by convention; `ndarray` names its type, `ndarray:TYPE:SHAPE`.
        type_name: Any = "<i8" if encoding == "bytes" else encoding.split(":")[1:2]
        try:
            if encoding == "str":
                return cell.decode()
            dtype = np.dtype(
                type_name if isinstance(type_name, str) else type_name[0]
            ).newbyteorder("<")
            return np.frombuffer(cell, dtype)
        except ValueError as error:
            raise CorpusError(f"{printable(location)}: {error}; write it again") from error

    def _damage_error(self, problem: str) -> CorpusError:
        return CorpusError(
            f"{printable(self._folder / 'index.json')}: {printable(problem)}; download it again"
        )
