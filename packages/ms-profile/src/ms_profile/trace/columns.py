"""A trace as columns: one row a span, names and threads as numbers into tables.

Columns of a million spans take 41 MB, where the profiler's JSON took some 400.
"""

from enum import IntEnum
from typing import Final

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

__all__ = ["EXPORT", "Category", "CollectiveNote", "Memory", "Thread", "Trace"]


EXPORT: Final = "ms-profile: all ranks for Perfetto"
"""What an export of `export_perfetto` says under `otherData` as its `producer`."""


class Category(IntEnum):
    """What a span is, whoever's profiler wrote it."""

    OTHER = 0
    OPERATOR = 1
    """An operator of torch on the host."""
    ANNOTATION = 2
    """A scope named by the program or by torch: `ProfilerStep#3`, `Optimizer.step#AdamW.step`."""
    RUNTIME = 3
    """A call into the driver: launches, copies, waits."""
    KERNEL = 4
    """Computation on a device."""
    COPY = 5
    """A copy or fill on a device."""
    COLLECTIVE = 6
    """Communication where it runs: a device's kernel, or gloo's own thread."""
    PYTHON = 7
    """A Python function, where stacks were recorded."""
    DEVICE_ANNOTATION = 8
    """A host scope as the device saw it."""
    OVERHEAD = 9
    """The profiler's own work."""
    DEVICE_WAIT = 10
    """A device's stream waiting for an event or a peer."""


@frozen(kw_only=True)
class Thread:
    """A thread of the host or a stream of a device."""

    process: int | str
    thread: int | str
    process_name: str = ""
    name: str = ""


@frozen(kw_only=True, eq=False)
class Memory:
    """What was allocated, at every allocation and release; all columns (M,)."""

    at_ns: NDArray[np.int64]
    change_bytes: NDArray[np.int64]
    allocated_bytes: NDArray[np.int64]
    """In all after it, as the allocator counts."""
    reserved_bytes: NDArray[np.int64]
    device: NDArray[np.int32]
    """-1 is the host."""
    thread: NDArray[np.int32]


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


@frozen(kw_only=True, eq=False)
class Trace:
    """The spans of one rank's file, ordered by thread, start, and longest first.

    All columns are (N,). Instants are nanoseconds of the wall clock where the trace says how its
    clock stands to it, else of the trace's own.
    """

    start_ns: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    name: NDArray[np.int32]
    category: NDArray[np.uint8]
    thread: NDArray[np.int32]
    external: NDArray[np.int64]
    """Which operator launched it; -1 where not said. An operator carries its own number."""
    correlation: NDArray[np.int64]
    shape: NDArray[np.int32]
    moved_bytes: NDArray[np.int64]
    names: tuple[str, ...]
    shapes: tuple[str, ...]
    """Number 0 is "not recorded"."""
    threads: tuple[Thread, ...]
    memory: Memory
    notes: dict[int, CollectiveNote] = field(factory=dict)
    """Of collectives, by their row."""
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
        """Rows of these categories, ascending."""
        return np.flatnonzero(np.isin(self.category, [int(c) for c in categories]))

    def name_of(self, row: int) -> str:
        """The name of one span."""
        return self.names[int(self.name[row])]
