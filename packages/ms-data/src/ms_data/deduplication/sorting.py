"""External sorting: distributes records to files by their high key bits, then sorts each file.

If many records share a key (runs of zeros, for example), a file itself may exceed memory. It is
then sorted in parts, which are merged.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MEMORY_BYTES = 64 << 20
"""Average size of a file, and maximum size of a yielded part; sorting needs three times this."""
MAX_FILES = 4096
BUFFER_BYTES = 32 << 20
"""Total size of the buffers of all files."""

RECORD = np.dtype([("key", "<u8"), ("check", "<u4"), ("document", "<u4")])
"""A key of a document; documents with equal key and check are duplicates."""
WINDOW = np.dtype([("key", "<u8"), ("document", "<u4"), ("word", "<u4")])
"""A window of words: hash, document, and first word."""
DOCUMENT = np.dtype([("size", "<u4"), ("rank", "<u4")])
"""Size of a document in bytes, and the index of the first pattern that its file matches."""
SPAN = np.dtype([("key", "<u8"), ("first", "<u4"), ("end", "<u4")])
"""Repeated words of a document: the first, and one past the last. The key is the document, in the
high bits."""

Records = NDArray[Any]


class Buckets:
    """Records in files, by the high bits of the field `key`."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], expected_bytes: int) -> None:
        count = 1
        while count < MAX_FILES and expected_bytes / count > MEMORY_BYTES:
            count *= 2
        self._dtype = dtype
        self._bits = count.bit_length() - 1
        folder.mkdir(parents=True, exist_ok=True)
        self._paths = [folder / f"{number:04d}" for number in range(count)]
        for path in folder.iterdir():
            path.unlink()
        self._buffers: list[list[bytes]] = [[] for _ in range(count)]
        self._buffered_bytes = 0

    def add(self, records: Records) -> None:
        """Add records."""
        if self._bits:
            bucket_numbers = (records["key"] >> np.uint64(64 - self._bits)).astype(np.int64)
            # stable: equal keys keep their order
            records = records[np.argsort(bucket_numbers, kind="stable")]
            ends = np.cumsum(np.bincount(bucket_numbers, minlength=len(self._paths)))
            parts = np.split(records, ends[:-1])
        else:
            parts = [records]
        for buffer, part in zip(self._buffers, parts, strict=True):
            if len(part):
                buffer.append(part.tobytes())
        self._buffered_bytes += records.nbytes
        if self._buffered_bytes > BUFFER_BYTES:
            self._flush()

    def sorted(self) -> Iterator[Records]:
        """Yield the records sorted by key; records of equal key keep their order.

        All records of a key are in one part, unless they exceed memory; then they are in several
        consecutive parts. Files are removed after reading.
        """
        self._flush()
        for path in self._paths:
            if not path.exists():
                continue
            if path.stat().st_size <= 2 * MEMORY_BYTES:
                records = np.fromfile(path, self._dtype)
                path.unlink()
                yield _by_key(records)
            else:
                yield from _merge_sort(path, self._dtype)
                path.unlink()

    def _flush(self) -> None:
        for path, buffer in zip(self._paths, self._buffers, strict=True):
            if buffer:
                with path.open("ab") as file:
                    file.writelines(buffer)
                buffer.clear()
        self._buffered_bytes = 0


def _by_key(records: Records) -> Records:
    return records[np.argsort(records["key"], kind="stable")]


def _merge_sort(path: Path, dtype: np.dtype[Any]) -> Iterator[Records]:
    """Yield the records of a large file sorted by key, in parts of bounded size."""
    size, part_size = path.stat().st_size // dtype.itemsize, max(1, MEMORY_BYTES // dtype.itemsize)
    # Sort parts of the file in place, then merge them.
    begins = range(0, size, part_size)
    with path.open("r+b") as file:
        for begin in begins:
            records = _by_key(np.fromfile(path, dtype, part_size, offset=begin * dtype.itemsize))
            file.seek(begin * dtype.itemsize)
            file.write(records.tobytes())
    read_size = max(1, part_size // len(begins))
    parts = [
        _SortedPart(path, dtype, begin, min(begin + part_size, size), read_size) for begin in begins
    ]
    while sum(part.fill() for part in parts):
        # last key that each part has read
        unread = [part.buffered["key"][-1] for part in parts if part.has_more]
        if not unread:
            yield _by_key(np.concatenate([part.take(len(part.buffered)) for part in parts]))
            continue
        # Records not read yet have keys of at least this, so everything below is complete.
        lower_bound = min(unread)
        complete = [
            part.take(int(np.searchsorted(part.buffered["key"], lower_bound))) for part in parts
        ]
        if any(map(len, complete)):
            yield _by_key(np.concatenate(complete))
        else:
            for part in parts:
                yield from part.take_all_of(lower_bound)


class _SortedPart:
    """A sorted part of a file, read in blocks."""

    def __init__(
        self, path: Path, dtype: np.dtype[Any], begin: int, end: int, read_size: int
    ) -> None:
        self._path, self._position, self._end, self._read_size = path, begin, end, read_size
        self.buffered: Records = np.empty(0, dtype)
        """Records read but not taken yet."""

    @property
    def has_more(self) -> bool:
        """Whether there are unread records."""
        return self._position < self._end

    def fill(self) -> bool:
        """Read more records if few are buffered; return whether any are left."""
        dtype = self.buffered.dtype
        count = min(self._read_size, self._end - self._position)
        if count and 2 * len(self.buffered) <= self._read_size:
            block = np.fromfile(self._path, dtype, count, offset=self._position * dtype.itemsize)
            self._position += count
            self.buffered = np.concatenate((self.buffered, block))
        return len(self.buffered) > 0

    def take(self, count: int) -> Records:
        """Remove and return the first `count` buffered records."""
        records, self.buffered = self.buffered[:count], self.buffered[count:]
        return records

    def take_all_of(self, key: np.uint64) -> Iterator[Records]:
        """Remove and yield all records with the smallest key, in blocks."""
        while self.fill() and self.buffered["key"][0] == key:
            yield self.take(int(np.searchsorted(self.buffered["key"], key, side="right")))


def repeat_first_record(parts: Iterable[Records]) -> Iterator[Records]:
    """If a part starts with the last key of the previous part, prepend that key's first record."""
    first: Records | None = None
    for part in parts:
        if first is not None and part["key"][0] == first["key"][0]:
            part = np.concatenate((first, part))
        start = int(np.searchsorted(part["key"], part["key"][-1]))
        first = part[start : start + 1].copy()
        yield part


def runs(records: Records, *fields: str) -> NDArray[np.int64]:
    """Return the index of the first record of each record's run of equal fields, shape (n,)."""
    if not len(records):
        return np.empty(0, np.int64)
    is_first = np.ones(len(records), bool)  # whether a record starts a run
    is_first[1:] = np.logical_or.reduce(
        [records[name][1:] != records[name][:-1] for name in fields]
    )
    starts = np.flatnonzero(is_first)
    result: NDArray[np.int64] = starts[np.cumsum(is_first) - 1]
    return result
