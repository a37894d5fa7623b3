"""Waiting for batches and idle time: totals, causes, and the longest intervals."""

from typing import Any, Final

import numpy as np

from ms_profile.analysis.activity import PHASES
from ms_profile.analysis.whole_run import Analysis
from ms_profile.trace.intervals import Intervals, clip, length_ns, subtract, union

MAX_INTERVALS: Final = 60
BUSY: Final = ("compute", "collective", "copy")
CAUSES: Final = tuple(name for name in PHASES if name not in BUSY)


def summarize_data(analysis: Analysis) -> dict[str, Any]:
    """Summarize the waits for batches.

    `ranks` has rows [rank, waited ns, ns in which nothing else ran], `longest` [rank, start, ns].
    Both times are None if the rank's trace shows no waits.
    """
    ranks: list[list[Any]] = []
    longest: list[tuple[int, int, int]] = []
    for rank in analysis.ranks.values():
        if "data" in rank.activity.unmeasured:
            ranks.append([rank.rank, None, None])
            continue
        waits = rank.activity.in_steps(rank.activity.data)
        ranks.append([rank.rank, length_ns(waits), rank.phase_ns("data")])
        longest += [(rank.rank, start, end - start) for start, end in waits.tolist()]
    return {"ranks": ranks, "longest": _longest(analysis, longest)}


def summarize_idle(analysis: Analysis) -> dict[str, Any]:
    """Summarize the time without compute, communication and copies.

    `ranks` has rows [rank, wall, idle, {cause: ns}]; a cause that the rank's trace cannot show is
    None. `longest` has rows [rank, start, ns, cause], with the cause that takes most of the gap.
    """
    ranks: list[list[Any]] = []
    longest: list[tuple[int, int, int, str]] = []
    for rank in analysis.ranks.values():
        parts = rank.activity.parts
        busy = np.concatenate([parts[name] for name in BUSY])
        steps = np.array([[step.start_ns, step.end_ns] for step in rank.activity.steps], np.int64)
        gaps = subtract(union(steps[:, 0], steps[:, 1]), union(busy[:, 0], busy[:, 1]))  # (G, 2) ns
        causes = {
            name: None if name in rank.activity.unmeasured
            else rank.phase_ns(name)
            for name in CAUSES
        }  # fmt: skip
        ranks.append([rank.rank, rank.wall_ns, length_ns(gaps), causes])
        length = gaps[:, 1] - gaps[:, 0]
        for start, end in gaps[np.argsort(-length, kind="stable")[:MAX_INTERVALS]].tolist():
            longest.append((rank.rank, start, end - start, _cause(parts, start, end)))
    return {"ranks": ranks, "longest": _longest(analysis, longest)}


def _cause(parts: dict[str, Intervals], start: int, end: int) -> str:
    """Return the phase that takes most of a gap; time outside all phases is "host"."""
    by_cause = {name: length_ns(clip(parts[name], start, end)) for name in CAUSES if name in parts}
    by_cause["host"] = end - start - sum(by_cause.values())
    return max(by_cause, key=lambda name: by_cause[name])


def _longest(analysis: Analysis, intervals: list[Any]) -> list[list[Any]]:
    """Return the longest intervals of all ranks, their starts as text on the common clock."""
    return [
        [rank, str(analysis.ranks[rank].common_ns(start)), length, *details]
        for rank, start, length, *details in sorted(intervals, key=lambda row: -row[2])[
            :MAX_INTERVALS
        ]
    ]
