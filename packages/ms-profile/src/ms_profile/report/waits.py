"""Waiting for batches and idle time: how much of it, because of what, and its longest stretches."""

from typing import Any, Final

import numpy as np

from ms_profile.analysis.activity import PHASES
from ms_profile.analysis.whole_run import Analysis
from ms_profile.trace.intervals import Intervals, clip, length_ns, subtract, union

MOST_STRETCHES: Final = 60
BUSY: Final = ("compute", "collective", "copy")
CAUSES: Final = tuple(name for name in PHASES if name not in BUSY)


def summarise_data(analysis: Analysis) -> dict[str, Any]:
    """Summarise the waits for batches.

    `ranks` holds [rank, waited, with nothing else], `longest` holds [rank, at, ns]. Both times are
    None where the rank's trace shows no waits.
    """
    ranks: list[list[Any]] = []
    longest: list[tuple[int, int, int]] = []
    for one in analysis.ranks.values():
        if "data" in one.activity.unmeasured:
            ranks.append([one.rank, None, None])
            continue
        waits = one.activity.in_steps(one.activity.data)
        ranks.append([one.rank, length_ns(waits), one.phase_ns("data")])
        longest += [(one.rank, start, end - start) for start, end in waits.tolist()]
    return {"ranks": ranks, "longest": _longest(analysis, longest)}


def summarise_idle(analysis: Analysis) -> dict[str, Any]:
    """Summarise the time without compute, communication and copies.

    `ranks` holds [rank, wall, idle, {cause: ns}], where a cause that the rank's trace cannot show
    is None. `longest` holds the longest gaps, [rank, at, ns, cause], each with the cause that takes
    most of it.
    """
    ranks: list[list[Any]] = []
    longest: list[tuple[int, int, int, str]] = []
    for one in analysis.ranks.values():
        parts = one.activity.parts
        busy = np.concatenate([parts[name] for name in BUSY])
        steps = np.array([[s.start_ns, s.end_ns] for s in one.activity.steps], np.int64)
        gaps = subtract(union(steps[:, 0], steps[:, 1]), union(busy[:, 0], busy[:, 1]))
        causes = {
            name: None if name in one.activity.unmeasured
            else one.phase_ns(name)
            for name in CAUSES
        }  # fmt: skip
        ranks.append([one.rank, one.wall_ns, length_ns(gaps), causes])
        length = gaps[:, 1] - gaps[:, 0]
        for start, end in gaps[np.argsort(-length, kind="stable")[:MOST_STRETCHES]].tolist():
            longest.append((one.rank, start, end - start, _cause(parts, start, end)))
    return {"ranks": ranks, "longest": _longest(analysis, longest)}


def _cause(parts: dict[str, Intervals], start: int, end: int) -> str:
    """Return the phase that takes most of a gap; what no phase claims is "host"."""
    own = {name: length_ns(clip(parts[name], start, end)) for name in CAUSES if name in parts}
    own["host"] = end - start - sum(own.values())
    return max(own, key=lambda name: own[name])


def _longest(analysis: Analysis, stretches: list[Any]) -> list[list[Any]]:
    """Return the longest stretches of all ranks, their starts as text on the common clock."""
    return [
        [rank, str(analysis.ranks[rank].common_ns(start)), length, *rest]
        for rank, start, length, *rest in sorted(stretches, key=lambda one: -one[2])[
            :MOST_STRETCHES
        ]
    ]
