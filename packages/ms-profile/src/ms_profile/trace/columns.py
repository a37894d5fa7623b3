"""A trace as numpy columns: one row per span, with names and threads as ids into tables.

A million spans take 41 MB, compared with about 400 MB for the profiler's JSON.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from attrs import Factory, field, frozen
from numpy.typing import NDArray

from ms_profile.vendors.category import Category

EXPORT: Final = "ms-profile: all ranks for Perfetto"
"""`otherData.producer` of files written by `export_perfetto`."""


@frozen(kw_only=True)
class Thread:
    """A thread of the host or a stream of a device."""

    process: int | str
    thread: int | str
    process_name: str = ""
    name: str = ""


def _empty() -> NDArray[Any]:
    return np.zeros(0, np.int64)


def _zeros(trace: "Trace") -> NDArray[Any]:
    return np.zeros(len(trace.start_ns), np.int64)


def _unknown(trace: "Trace") -> NDArray[Any]:
    return np.full(len(trace.start_ns), -1, np.int64)


@frozen(kw_only=True, eq=False)
class Memory:
    """Memory allocations and releases; every column is (M,)."""

    at_ns: NDArray[np.int64] = field(factory=_empty)
    """Time of the event."""
    change_bytes: NDArray[np.int64] = field(factory=_empty)
    allocated_bytes: NDArray[np.int64] = field(factory=_empty)
    """Total allocated bytes after the event, as counted by the allocator."""
    reserved_bytes: NDArray[np.int64] = field(factory=_empty)
    address: NDArray[np.int64] = field(factory=_empty)
    """Address of the block; -1 if not recorded."""
    device: NDArray[np.int32] = field(factory=_empty)
    """Device index; -1 for the host."""
    thread: NDArray[np.int32] = field(factory=_empty)


@frozen(kw_only=True)
class CollectiveMessage:
    """Message of a collective: operation, sizes in elements, dtype and process group."""

    kind: str
    sent_elements: int
    received_elements: int
    dtype: str
    group: str
    group_size: int
    ranks: tuple[int, ...]


def matching(names: Sequence[str], pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    """Return a bool mask of the names that match `pattern` at their start, (max(N, 1),)."""
    # One entry even without names, so that an empty column of ids can index the mask.
    return np.array([pattern.match(text) is not None for text in names] or [False], bool)


@frozen(kw_only=True, eq=False)
class Trace:
    """The spans of one rank, sorted by thread, start, and longest first.

    Every column is (N,). Times are wall-clock nanoseconds if the trace relates its clock to the
    wall clock, otherwise nanoseconds of the trace's own clock.
    """

    start_ns: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    name: NDArray[np.int32]
    category: NDArray[np.uint8]
    thread: NDArray[np.int32]
    external: NDArray[np.int64] = field(default=Factory(_unknown, takes_self=True))
    """Id of the operator that launched the span, or of the operator itself; -1 if unknown."""
    correlation: NDArray[np.int64] = field(default=Factory(_unknown, takes_self=True))
    shape: NDArray[np.int32] = field(default=Factory(_zeros, takes_self=True))
    moved_bytes: NDArray[np.int64] = field(default=Factory(_zeros, takes_self=True))
    names: tuple[str, ...]
    shapes: tuple[str, ...] = ("",)
    """Table of input shapes; entry 0 means "not recorded"."""
    threads: tuple[Thread, ...]
    memory: Memory = field(factory=Memory)
    messages: dict[int, CollectiveMessage] = field(factory=dict)
    """Messages of collectives, by row."""
    rank: int | None = None
    world_size: int | None = None
    host: str = ""
    warnings: tuple[str, ...] = ()
    file_bytes: int = 0
    is_export: bool = False
    """Whether `export_perfetto` wrote it, so that it has the spans of all ranks."""

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> NDArray[np.int64]:
        """End of each span, (N,) int64 ns."""
        return self.start_ns + self.duration_ns

    @property
    def span_ns(self) -> tuple[int, int]:
        """First start and last end in ns; (0, 0) for an empty trace."""
        if not len(self):
            return 0, 0
        return int(self.start_ns.min()), int(self.end_ns.max())

    def rows(self, *categories: Category) -> NDArray[np.int64]:
        """Return the rows in these categories, ascending."""
        return np.flatnonzero(np.isin(self.category, [int(c) for c in categories]))

    def named(self, pattern: re.Pattern[str], *categories: Category) -> NDArray[np.int64]:
        """Return the rows whose names match `pattern` at their start, ascending.

        Args:
            pattern: regular expression, matched at the start of the name.
            categories: restrict to these categories; default: all.
        """
        rows = self.rows(*categories) if categories else np.arange(len(self))
        matches: NDArray[np.int64] = rows[matching(self.names, pattern)[self.name[rows]]]
        return matches

    def name_of(self, row: int) -> str:
        """Return the name of the span in a row."""
        return self.names[int(self.name[row])]
