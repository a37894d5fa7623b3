"""Allocated memory over time, and the operators that leave memory allocated."""

import re
from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ms_profile.trace.columns import Trace, matching
from ms_profile.trace.nesting import parents
from ms_profile.vendors.category import Category

MAX_POINTS = 1500
ALLOCATOR: Final = re.compile(
    r"aten::(new_)?(empty|zeros|ones|full)(_like|_strided)?$|aten::resize_$"
)


@frozen(kw_only=True, eq=False)
class MemoryTimeline:
    """Allocated memory of one device, reduced to at most 1,500 segments; every column is (P,)."""

    device: int
    """Device index; -1 for the host."""
    at_ns: NDArray[np.int64]
    """Start of each segment."""
    low_bytes: NDArray[np.int64]
    high_bytes: NDArray[np.int64]
    """Minimum and maximum within the segment, so no peak is lost."""


@frozen(kw_only=True)
class MemoryGrowth:
    """An operator and the growth of memory inside it."""

    name: str
    size_bytes: int
    """Allocated minus released bytes in its own calls, outside their children, over the trace:
    memory that calls leave allocated, even if others release it later."""


def memory_timeline(trace: Trace) -> tuple[MemoryTimeline, ...]:
    """Return one timeline per device; empty if the profiler did not record memory."""
    memory = trace.memory
    lines = []
    for device in np.unique(memory.device).tolist():
        on_device = memory.device == device
        at_ns, allocated = memory.at_ns[on_device], memory.allocated_bytes[on_device]
        # First event of each segment, (P,). Segments have equal numbers of events, not lengths.
        edges = np.unique(np.linspace(0, len(at_ns), min(MAX_POINTS, len(at_ns)) + 1).astype(int))[
            :-1
        ]
        lines.append(
            MemoryTimeline(
                device=device,
                at_ns=at_ns[edges],
                low_bytes=np.minimum.reduceat(allocated, edges),
                high_bytes=np.maximum.reduceat(allocated, edges),
            )
        )
    return tuple(lines)


def memory_growth(trace: Trace, *, limit: int = 20) -> tuple[MemoryGrowth, ...]:
    """Return the operators whose own calls grow memory most, largest first."""
    memory = trace.memory
    if not len(memory.at_ns):
        return ()
    sums = np.zeros(len(trace.names))
    operators = trace.rows(Category.OPERATOR)
    # Per thread, as the search below needs spans in order of their start.
    for thread in np.unique(memory.thread).tolist():
        rows = operators[trace.thread[operators] == thread]
        events = np.flatnonzero(memory.thread == thread)
        owner_row = innermost_spans(trace, rows, memory.at_ns[events])
        inside = owner_row >= 0
        name_id = trace.name[rows[owner_row[inside]]]
        sums += np.bincount(name_id, memory.change_bytes[events][inside], len(sums))
    growing = sorted(
        ((int(size), name) for name, size in zip(trace.names, sums, strict=True) if size > 0),
        key=lambda item: -item[0],
    )
    return tuple(MemoryGrowth(name=name, size_bytes=size) for size, name in growing[:limit])


def innermost_spans(
    trace: Trace, rows: NDArray[np.int64], at_ns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the index in `rows` of the innermost span open at each time; -1 outside of all spans.

    Operators that only allocate, such as `aten::empty`, are replaced by their caller if any.
    """
    if not len(rows):
        return np.full(len(at_ns), -1)
    start, duration = trace.start_ns[rows], trace.duration_ns[rows]
    parent = parents(trace.thread[rows], start, duration)
    # Take the last span that started before, then climb to the first ancestor still open.
    index = np.searchsorted(start, at_ns, side="right") - 1
    while (ended := (index >= 0) & (start[index] + duration[index] < at_ns)).any():
        index[ended] = parent[index[ended]]
    is_allocator = matching(trace.names, ALLOCATOR)[trace.name[rows]] & (parent >= 0)
    while (skip := (index >= 0) & is_allocator[index]).any():
        index[skip] = parent[index[skip]]
    return index
