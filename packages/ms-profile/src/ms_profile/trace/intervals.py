"""Sets of times as sorted, disjoint intervals: (N, 2) int64 ns, start before end."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.int64]


def union(start_ns: NDArray[Any], end_ns: NDArray[Any]) -> Intervals:
    """Merge spans, starts (N,) and ends (N,), into disjoint intervals; empty spans are dropped."""
    nonempty = end_ns > start_ns
    start, end = start_ns[nonempty], end_ns[nonempty]
    if not len(start):
        return np.zeros((0, 2), np.int64)
    order = np.argsort(start, kind="stable")
    # The running maximum covers spans that are nested in an earlier, longer one.
    start, end = start[order], np.maximum.accumulate(end[order])
    # A gap before a span begins a new interval; spans that touch are merged.
    is_first = np.concatenate(([True], start[1:] > end[:-1]))
    last = np.concatenate((np.flatnonzero(is_first)[1:] - 1, [len(start) - 1]))
    return np.stack([start[is_first], end[last]], axis=1).astype(np.int64)


def length_ns(intervals: Intervals) -> int:
    """Return the total length in ns."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the intersection of two interval sets."""
    if not len(a) or not len(b):
        return np.zeros((0, 2), np.int64)
    # Interval i of a overlaps b[first[i]:last[i]]; expand to all overlapping pairs.
    first = np.searchsorted(b[:, 1], a[:, 0], side="right")
    last = np.searchsorted(b[:, 0], a[:, 1], side="left")
    overlaps = np.maximum(last - first, 0)
    rows = np.repeat(np.arange(len(a)), overlaps)
    # Counts 0, 1, ... within the overlaps of each interval of a.
    offsets = np.arange(overlaps.sum()) - np.repeat(np.cumsum(overlaps) - overlaps, overlaps)
    b_rows = np.repeat(first, overlaps) + offsets
    start = np.maximum(a[rows, 0], b[b_rows, 0])
    end = np.minimum(a[rows, 1], b[b_rows, 1])
    common: Intervals = np.stack([start, end], axis=1)[end > start]
    return common


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the parts of `a` that are not in `b`."""
    if not len(a) or not len(b):
        return a
    low = int(min(a[0, 0], b[0, 0]))
    high = int(max(a[-1, 1], b[-1, 1]))
    # Pairing b's edges one position later gives the gaps between its intervals and around them.
    edges = np.concatenate(([low], b.reshape(-1), [high]))
    gaps = edges.reshape(-1, 2)
    return intersect(a, gaps[gaps[:, 1] > gaps[:, 0]])


def clip(intervals: Intervals, start_ns: int, end_ns: int) -> Intervals:
    """Return the part of the intervals between two times."""
    return intersect(intervals, np.array([[start_ns, end_ns]], np.int64))
