"""Waiting for batches and idle time: how much of it, because of what, and its longest stretches."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ms_profile.analysis.activity import PHASES
from ms_profile.analysis.whole_run import Analysis, RankAnalysis
from ms_profile.trace.intervals import Intervals, clip, length_ns, subtract, union

__all__ = ["data_facts", "idle_facts"]

MOST_STRETCHES: Final = 60
BUSY: Final = ("compute", "collective", "copy")
CAUSES: Final = tuple(name for name in PHASES if name not in BUSY)


def data_facts(analysis: Analysis) -> dict[str, Any]:
    """Waits for batches: `ranks` of [rank, waited, of it alone], the `longest` of [rank, at, ns].

    Both times are None where the rank's trace shows no waits.
    """
    ranks: list[list[Any]] = []
    longest: list[tuple[int, int, int]] = []
    for one in analysis.ranks.values():
        if "data" in one.activity.unmeasured:
            ranks.append([one.rank, None, None])
            continue
        waits = _in_steps(one, one.activity.data)
        alone = sum(step.phases_ns["data"] for step in one.breakdowns)
        ranks.append([one.rank, length_ns(waits), alone])
        longest += [(one.rank, start, end - start) for start, end in waits.tolist()]
    return {"ranks": ranks, "longest": _longest(analysis, longest)}


def idle_facts(analysis: Analysis) -> dict[str, Any]:
    """Time without compute, communication and copies: `ranks` of [rank, wall, idle, {cause: ns}].

    A cause that the rank's trace cannot show is None. The `longest` gaps are [rank, at, ns, cause],
    each with the cause that takes most of it.
    """
    ranks: list[list[Any]] = []
    longest: list[tuple[int, int, int, str]] = []
    for one in analysis.ranks.values():
        parts = one.activity.partition()
        busy = np.concatenate([parts[name] for name in BUSY])
        steps = np.array([[s.start_ns, s.end_ns] for s in one.activity.steps], np.int64)
        gaps = subtract(union(steps[:, 0], steps[:, 1]), union(busy[:, 0], busy[:, 1]))
        causes = {
            name: None if name in one.activity.unmeasured
            else sum(step.phases_ns[name] for step in one.breakdowns)
            for name in CAUSES
        }  # fmt: skip
        wall = sum(step.step.duration_ns for step in one.breakdowns)
        ranks.append([one.rank, wall, length_ns(gaps), causes])
        length = gaps[:, 1] - gaps[:, 0]
        for start, end in gaps[np.argsort(-length, kind="stable")[:MOST_STRETCHES]].tolist():
            longest.append((one.rank, start, end - start, _cause(parts, start, end)))
    return {"ranks": ranks, "longest": _longest(analysis, longest)}


def _cause(parts: dict[str, Intervals], start: int, end: int) -> str:
    """The phase that takes most of a gap; what no phase claims is "host"."""
    own = {name: length_ns(clip(parts[name], start, end)) for name in CAUSES if name in parts}
    own["host"] = end - start - sum(own.values())
    return max(own, key=lambda name: own[name])


def _in_steps(one: RankAnalysis, intervals: Intervals) -> NDArray[np.int64]:
    parts = [clip(intervals, step.start_ns, step.end_ns) for step in one.activity.steps]
    return np.concatenate(parts) if parts else intervals[:0]


def _longest(analysis: Analysis, stretches: list[Any]) -> list[list[Any]]:
    """The longest stretches of all ranks, their starts as text on the common clock."""
    found = []
    for rank, start, length, *rest in sorted(stretches, key=lambda one: -one[2])[:MOST_STRETCHES]:
        clock = analysis.ranks[rank].clock
        at = start if clock is None else int(clock.correct(np.array([start]))[0])
        found.append([rank, str(at), length, *rest])
    return found
