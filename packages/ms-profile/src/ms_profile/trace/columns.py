"""A trace as columns: one row a span, names and threads as numbers into tables.

Columns of a million spans take 41 MB, where the profiler's JSON took some 400.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from attrs import Factory, field, frozen
from numpy.typing import NDArray

from ms_profile.vendors.category import Category

EXPORT: Final = "ms-profile: all ranks for Perfetto"
"""The `producer` under `otherData` of a file that `export_perfetto` wrote."""


@frozen(kw_only=True)
class Thread:
    """A thread of the host or a stream of a device."""

    process: int | str
    thread: int | str
    process_name: str = ""
    name: str = ""


def _nothing() -> NDArray[Any]:
    return np.zeros(0, np.int64)


def _zeros(trace: "Trace") -> NDArray[Any]:
    return np.zeros(len(trace.start_ns), np.int64)


def _unknown(trace: "Trace") -> NDArray[Any]:
    return np.full(len(trace.start_ns), -1, np.int64)


@frozen(kw_only=True, eq=False)
class Memory:
    """What was allocated, at every allocation and release; all columns (M,)."""

    at_ns: NDArray[np.int64] = field(factory=_nothing)
    change_bytes: NDArray[np.int64] = field(factory=_nothing)
    allocated_bytes: NDArray[np.int64] = field(factory=_nothing)
    """In all after it, as the allocator counts."""
    reserved_bytes: NDArray[np.int64] = field(factory=_nothing)
    device: NDArray[np.int32] = field(factory=_nothing)
    """-1 is the host."""
    thread: NDArray[np.int32] = field(factory=_nothing)


@frozen(kw_only=True)
class CollectiveNote:
    """What the profiler noted of a collective's message."""

    kind: str
    sent_elements: int
    received_elements: int
    dtype: str
    group: str
    group_size: int
    ranks: tuple[int, ...]


def matching(names: Sequence[str], pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    """Return which names match a pattern from their start, (max(N, 1),) bool."""
    return np.array([pattern.match(text) is not None for text in names] or [False], bool)


@frozen(kw_only=True, eq=False)
class Trace:
    """The spans of one rank's file, ordered by thread, start, and longest first.

    All columns are (N,). Instants are nanoseconds of the wall clock where the trace relates
    its clock to it, else of the trace's own.
    """

    start_ns: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    name: NDArray[np.int32]
    category: NDArray[np.uint8]
    thread: NDArray[np.int32]
    external: NDArray[np.int64] = field(default=Factory(_unknown, takes_self=True))
    """Which operator launched it; -1 where not noted. An operator carries its own number."""
    correlation: NDArray[np.int64] = field(default=Factory(_unknown, takes_self=True))
    shape: NDArray[np.int32] = field(default=Factory(_zeros, takes_self=True))
    moved_bytes: NDArray[np.int64] = field(default=Factory(_zeros, takes_self=True))
    names: tuple[str, ...]
    shapes: tuple[str, ...] = ("",)
    """Number 0 is "not recorded"."""
    threads: tuple[Thread, ...]
    memory: Memory = field(factory=Memory)
    notes: dict[int, CollectiveNote] = field(factory=dict)
    """What was noted of collectives, by their row."""
    rank: int | None = None
    world_size: int | None = None
    host: str = ""
    warnings: tuple[str, ...] = ()
    file_bytes: int = 0
    is_export: bool = False
    """Whether it holds all ranks of a run, as `export_perfetto` writes them."""

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> NDArray[np.int64]:
        """When each span ended, (N,) int64 ns."""
        return self.start_ns + self.duration_ns

    @property
    def span_ns(self) -> tuple[int, int]:
        """First start and last end; (0, 0) of an empty trace."""
        if not len(self):
            return 0, 0
        return int(self.start_ns.min()), int(self.end_ns.max())

    def rows(self, *categories: Category) -> NDArray[np.int64]:
        """Return the rows of these categories, ascending."""
        return np.flatnonzero(np.isin(self.category, [int(c) for c in categories]))

    def named(self, pattern: re.Pattern[str], *categories: Category) -> NDArray[np.int64]:
        """Return those rows of these categories whose names begin with a pattern, ascending."""
        rows = self.rows(*categories) if categories else np.arange(len(self))
        found: NDArray[np.int64] = rows[matching(self.names, pattern)[self.name[rows]]]
        return found

    def name_of(self, row: int) -> str:
        """Return the name of one span."""
        return self.names[int(self.name[row])]
