"""What was allocated over time, and which operators left how much of it behind."""

import re
from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ms_profile.trace.columns import Trace, matching
from ms_profile.trace.nesting import parents
from ms_profile.vendors.category import Category

MOST_POINTS = 1500
ALLOCATOR: Final = re.compile(
    r"aten::(new_)?(empty|zeros|ones|full)(_like|_strided)?$|aten::resize_$"
)


@frozen(kw_only=True, eq=False)
class MemoryTimeline:
    """Allocated memory of one device, thinned to at most 1,500 stretches; columns (P,)."""

    device: int
    """-1 is the host."""
    at_ns: NDArray[np.int64]
    """When each stretch begins."""
    low_bytes: NDArray[np.int64]
    high_bytes: NDArray[np.int64]
    """Least and most within the stretch: thinning loses no peak."""


@frozen(kw_only=True)
class MemoryGrowth:
    """An operator and the growth of memory inside it."""

    name: str
    size_bytes: int
    """Allocated less released inside its own calls and in none of their children, over the trace:
    what each call leaves behind, though others release it later."""


def memory_timeline(trace: Trace) -> tuple[MemoryTimeline, ...]:
    """Return one line a device; none where the profiler didn't record memory."""
    memory = trace.memory
    lines = []
    for device in np.unique(memory.device).tolist():
        here = memory.device == device
        at, level = memory.at_ns[here], memory.allocated_bytes[here]
        edges = np.unique(np.linspace(0, len(at), min(MOST_POINTS, len(at)) + 1).astype(int))[:-1]
        lines.append(
            MemoryTimeline(
                device=device,
                at_ns=at[edges],
                low_bytes=np.minimum.reduceat(level, edges),
                high_bytes=np.maximum.reduceat(level, edges),
            )
        )
    return tuple(lines)


def memory_growth(trace: Trace, *, most: int = 20) -> tuple[MemoryGrowth, ...]:
    """Return the operators whose own calls grow memory most, the largest first."""
    memory = trace.memory
    if not len(memory.at_ns):
        return ()
    sums = np.zeros(len(trace.names))
    operators = trace.rows(Category.OPERATOR)
    for thread in np.unique(memory.thread).tolist():
        rows = operators[trace.thread[operators] == thread]
        places = np.flatnonzero(memory.thread == thread)
        owner = _owners(trace, rows, memory.at_ns[places])
        owned = owner >= 0
        code = trace.name[rows[owner[owned]]]
        sums += np.bincount(code, memory.change_bytes[places][owned], len(sums))
    growing = sorted(
        ((int(size), name) for name, size in zip(trace.names, sums, strict=True) if size > 0),
        key=lambda item: -item[0],
    )
    return tuple(MemoryGrowth(name=name, size_bytes=size) for size, name in growing[:most])


def _owners(trace: Trace, rows: NDArray[np.int64], at_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Find where in `rows` the innermost span open at each instant is; -1 outside of all.

    Operators that only allocate stand for the one that called them, where one did.
    """
    if not len(rows):
        return np.full(len(at_ns), -1)
    start, duration = trace.start_ns[rows], trace.duration_ns[rows]
    above = parents(trace.thread[rows], start, duration)
    place = np.searchsorted(start, at_ns, side="right") - 1
    while (over := (place >= 0) & (start[place] + duration[place] < at_ns)).any():
        place[over] = above[place[over]]
    called = matching(trace.names, ALLOCATOR)[trace.name[rows]] & (above >= 0)
    while (passing := (place >= 0) & called[place]).any():
        place[passing] = above[place[passing]]
    return place
