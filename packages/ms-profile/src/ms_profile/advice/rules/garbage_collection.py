"""Python's garbage collector stops a rank, and with it all others."""

import numpy as np

from ms_profile.advice.finding import Finding, longest_intervals
from ms_profile.analysis.activity import Breakdown
from ms_profile.analysis.whole_run import Analysis, RankAnalysis
from ms_profile.trace.intervals import Intervals, clip

__all__ = ["garbage_collection"]

LEAST_SHARE = 0.01
LEAST_PAUSES = 2


def garbage_collection(analysis: Analysis) -> Finding | None:
    """Fire where collections that come again take 1% or more of the wall time.

    The first traced step is left out where there are others: starting the tracer makes objects of
    its own, which a collection in that step then looks through. One collection alone is no habit.
    """
    ranks = list(analysis.ranks.values())
    shares = [_share(one) for one in ranks]
    one, share = ranks[int(np.argmax(shares))], max(shares)
    pauses = _pauses(one)
    if share < LEAST_SHARE or len(pauses) < LEAST_PAUSES:
        return None
    time_ns = sum(step.phases_ns["garbage"] for step in _judged(one))
    return Finding(
        rule="garbage_collection",
        title=f"Python's garbage collector takes {share:.1%} of rank {one.rank}'s time",
        advice="Call gc.freeze() after set-up and gc.disable(), and collect on all ranks at the "
        "same step, every few hundred steps.",
        gain_ns=time_ns,
        gain_share=share,
        evidence=longest_intervals(one, "garbage collection", pauses),
    )


def _judged(one: RankAnalysis) -> tuple[Breakdown, ...]:
    return one.breakdowns[1:] or one.breakdowns


def _share(one: RankAnalysis) -> float:
    steps = _judged(one)
    wall = sum(step.step.duration_ns for step in steps)
    return sum(step.phases_ns["garbage"] for step in steps) / max(wall, 1)


def _pauses(one: RankAnalysis) -> Intervals:
    steps = [breakdown.step for breakdown in _judged(one)]
    parts = [clip(one.activity.garbage, step.start_ns, step.end_ns) for step in steps]
    return np.concatenate(parts) if parts else one.activity.garbage[:0]
