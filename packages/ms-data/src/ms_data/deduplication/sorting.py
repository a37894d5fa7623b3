"""Sorts more records than memory holds: by their first bits into files, then file by file.

Where many records share a key, as rows of zeros do, a file is itself more than memory holds. It is
sorted in parts, which are then merged.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MEMORY_BYTES = 64 << 20
"""Records of one file, on average, and of one part that is given; sorting takes about three times
as much."""
MOST_FILES = 4096
BUFFER_BYTES = 32 << 20
"""Buffers of all files together."""

Records = NDArray[Any]


class Buckets:
    """Records by the first bits of the field `key`."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], expected_bytes: int) -> None:
        count = 1
        while count < MOST_FILES and expected_bytes / count > MEMORY_BYTES:
            count *= 2
        self._dtype = dtype
        self._bits = count.bit_length() - 1
        folder.mkdir(parents=True, exist_ok=True)
        self._paths = [folder / f"{number:04d}" for number in range(count)]
        for path in folder.iterdir():
            path.unlink()
        self._waiting: list[list[bytes]] = [[] for _ in range(count)]
        self._held_bytes = 0

    def add(self, records: Records) -> None:
        """Take some records."""
        if self._bits:
            places = (records["key"] >> np.uint64(64 - self._bits)).astype(np.int64)
            records = records[np.argsort(places, kind="stable")]
            ends = np.cumsum(np.bincount(places, minlength=len(self._paths)))
            parts = np.split(records, ends[:-1])
        else:
            parts = [records]
        for waiting, part in zip(self._waiting, parts, strict=True):
            if len(part):
                waiting.append(part.tobytes())
        self._held_bytes += records.nbytes
        if self._held_bytes > BUFFER_BYTES:
            self._flush()

    def sorted(self) -> Iterator[Records]:
        """Yield the records sorted by key, those of one key in the order of adding.

        All records of a key come in one part, but of a key with more than memory holds in several,
        one after the other. Each file is removed once it is read.
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
                yield from _merged(path, self._dtype)
                path.unlink()

    def _flush(self) -> None:
        for path, waiting in zip(self._paths, self._waiting, strict=True):
            if waiting:
                with path.open("ab") as file:
                    file.writelines(waiting)
                waiting.clear()
        self._held_bytes = 0


def _by_key(records: Records) -> Records:
    return records[np.argsort(records["key"], kind="stable")]


def _merged(path: Path, dtype: np.dtype[Any]) -> Iterator[Records]:
    """Yield the records of a large file sorted by key, a part of bounded size at a time."""
    size, most = path.stat().st_size // dtype.itemsize, max(1, MEMORY_BYTES // dtype.itemsize)
    begins = range(0, size, most)
    with path.open("r+b") as file:
        for begin in begins:
            records = _by_key(np.fromfile(path, dtype, most, offset=begin * dtype.itemsize))
            file.seek(begin * dtype.itemsize)
            file.write(records.tobytes())
    share = max(1, most // len(begins))
    parts = [_SortedPart(path, dtype, begin, min(begin + most, size), share) for begin in begins]
    while sum(part.fill() for part in parts):
        unread = [part.held["key"][-1] for part in parts if part.more]
        if not unread:
            yield _by_key(np.concatenate([part.take(len(part.held)) for part in parts]))
            continue
        # Whatever is not read yet comes at or behind the least of the last keys that are.
        least = min(unread)
        below = [part.take(int(np.searchsorted(part.held["key"], least))) for part in parts]
        if any(map(len, below)):
            yield _by_key(np.concatenate(below))
        else:
            for part in parts:
                yield from part.take_all_of(least)


class _SortedPart:
    """A part of a file that is sorted by key, read some records at a time."""

    def __init__(self, path: Path, dtype: np.dtype[Any], begin: int, end: int, share: int) -> None:
        self._path, self._at, self._end, self._share = path, begin, end, share
        self.held: Records = np.empty(0, dtype)
        """What is read and not taken."""

    @property
    def more(self) -> bool:
        """Whether there are records that are not read."""
        return self._at < self._end

    def fill(self) -> bool:
        """Read more where little is held; return whether anything is left."""
        dtype = self.held.dtype
        count = min(self._share, self._end - self._at)
        if count and 2 * len(self.held) <= self._share:
            read = np.fromfile(self._path, dtype, count, offset=self._at * dtype.itemsize)
            self._at += count
            self.held = np.concatenate((self.held, read))
        return len(self.held) > 0

    def take(self, count: int) -> Records:
        """Remove and return the first records that are held."""
        taken, self.held = self.held[:count], self.held[count:]
        return taken

    def take_all_of(self, key: np.uint64) -> Iterator[Records]:
        """Remove and yield all records of the least key, some at a time."""
        while self.fill() and self.held["key"][0] == key:
            yield self.take(int(np.searchsorted(self.held["key"], key, side="right")))


def with_first(parts: Iterable[Records]) -> Iterator[Records]:
    """Put the first record of a key before each further part of that key."""
    first: Records | None = None
    for part in parts:
        if first is not None and part["key"][0] == first["key"][0]:
            part = np.concatenate((first, part))
        at = int(np.searchsorted(part["key"], part["key"][-1]))
        first = part[at : at + 1].copy()
        yield part


def runs(records: Records, *fields: str) -> NDArray[np.int64]:
    """Find, for each record, the first of its run; the records of a run agree in all fields."""
    if not len(records):
        return np.empty(0, np.int64)
    fresh = np.ones(len(records), bool)
    fresh[1:] = np.logical_or.reduce([records[one][1:] != records[one][:-1] for one in fields])
    starts = np.flatnonzero(fresh)
    found: NDArray[np.int64] = starts[np.cumsum(fresh) - 1]
    return found
