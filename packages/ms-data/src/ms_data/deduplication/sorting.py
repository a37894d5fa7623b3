"""Sorts more records than memory holds: by their first bits into files, then file by file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MEMORY_BYTES = 64 << 20
"""Records of one file, on average; sorting takes about three times as much."""
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
        """Give the records sorted by key, those of one key in the order of adding.

        All records of a key come together. Each file is removed once it is read.
        """
        self._flush()
        for path in self._paths:
            if path.exists():
                records = np.fromfile(path, self._dtype)
                path.unlink()
                yield records[np.argsort(records["key"], kind="stable")]

    def _flush(self) -> None:
        for path, waiting in zip(self._paths, self._waiting, strict=True):
            if waiting:
                with path.open("ab") as file:
                    file.writelines(waiting)
                waiting.clear()
        self._held_bytes = 0


def runs(records: Records, *fields: str) -> NDArray[np.int64]:
    """Where the first record of its run stands, for each; a run agrees in all fields."""
    if not len(records):
        return np.empty(0, np.int64)
    fresh = np.ones(len(records), bool)
    fresh[1:] = np.logical_or.reduce([records[one][1:] != records[one][:-1] for one in fields])
    starts = np.flatnonzero(fresh)
    found: NDArray[np.int64] = starts[np.cumsum(fresh) - 1]
    return found
