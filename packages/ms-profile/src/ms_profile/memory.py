"""What was allocated over time, and which operators allocated what the peak held."""

from collections import defaultdict

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ms_profile.trace.columns import Category, Trace

__all__ = ["MemoryLine", "PeakHolder", "memory_peaks", "memory_timeline"]

MOST_POINTS = 1500


@frozen(kw_only=True, eq=False)
class MemoryLine:
    """Allocated memory of one device, thinned to at most 1,500 stretches; columns (P,)."""

    device: int
    """-1 is the host."""
    at_ns: NDArray[np.int64]
    """When each stretch begins."""
    low_bytes: NDArray[np.int64]
    high_bytes: NDArray[np.int64]
    """Least and most within the stretch: thinning loses no peak."""


@frozen(kw_only=True)
class PeakHolder:
    """An operator and the growth of memory inside it."""

    name: str
    size_bytes: int
    """Allocated and not released inside its own calls, over the trace."""


def memory_timeline(trace: Trace) -> tuple[MemoryLine, ...]:
    """Return one line a device; none where the profiler didn't record memory."""
    memory = trace.memory
    lines = []
    for device in np.unique(memory.device).tolist():
        here = memory.device == device
        at, level = memory.at_ns[here], memory.allocated_bytes[here]
        edges = np.unique(np.linspace(0, len(at), min(MOST_POINTS, len(at)) + 1).astype(int))[:-1]
        lines.append(
            MemoryLine(
                device=device,
                at_ns=at[edges],
                low_bytes=np.minimum.reduceat(level, edges),
                high_bytes=np.maximum.reduceat(level, edges),
            )
        )
    return tuple(lines)


def memory_peaks(trace: Trace, *, most: int = 20) -> tuple[PeakHolder, ...]:
    """Return the operators whose own calls grow memory most, the largest first."""
    memory = trace.memory
    if not len(memory.at_ns):
        return ()
    sums: dict[str, int] = defaultdict(int)
    operators = trace.rows(Category.OPERATOR)
    for thread in np.unique(memory.thread).tolist():
        rows = operators[trace.thread[operators] == thread]
        places = np.flatnonzero(memory.thread == thread)
        if not len(rows):
            continue
        owner = _innermost(trace, rows, memory.at_ns[places])
        change = memory.change_bytes[places]
        for code in np.unique(trace.name[rows[owner[owner >= 0]]]).tolist():
            mine = (owner >= 0) & (trace.name[rows[np.maximum(owner, 0)]] == code)
            sums[trace.names[code]] += int(change[mine].sum())
    growing = sorted(
        ((size, name) for name, size in sums.items() if size > 0), key=lambda item: -item[0]
    )
    return tuple(PeakHolder(name=name, size_bytes=size) for size, name in growing[:most])


def _innermost(
    trace: Trace, rows: NDArray[np.int64], at_ns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Place in `rows` of the last span begun before each instant, if still open; else -1."""
    place = np.searchsorted(trace.start_ns[rows], at_ns, side="right") - 1
    safe = np.maximum(place, 0)
    end = trace.start_ns[rows[safe]] + trace.duration_ns[rows[safe]]
    return np.where((place >= 0) & (end >= at_ns), place, -1)
