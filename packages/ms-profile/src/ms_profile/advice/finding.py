"""What a rule found, and what rules look things up with."""

from collections.abc import Iterable

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ms_profile.analysis.activity import Activity
from ms_profile.analysis.whole_run import Analysis, RankAnalysis
from ms_profile.trace.intervals import Intervals, clip

__all__ = ["Evidence", "Finding", "longest_intervals", "longest_rows", "phase_ns", "wall_ns"]

MOST_EVIDENCE = 5


@frozen(kw_only=True)
class Evidence:
    """One span of time that a finding rests on."""

    rank: int
    name: str
    start_ns: int
    """On the clock of the lowest rank, or the rank's own where that is not known."""
    duration_ns: int


@frozen(kw_only=True)
class Finding:
    """One piece of advice."""

    rule: str
    """Name of the rule: its file's."""
    title: str
    """What was seen, with its figures."""
    advice: str
    """What to do about it."""
    gain_ns: float
    """Estimated time that it would save, on the slowest rank, over the recorded steps."""
    gain_share: float
    """The same as a share of those steps' wall time."""
    evidence: tuple[Evidence, ...]


def wall_ns(one: RankAnalysis) -> int:
    """Wall time of a rank's recorded steps."""
    return sum(step.step.duration_ns for step in one.breakdowns)


def phase_ns(one: RankAnalysis, phase: str) -> int:
    """Time of a rank's recorded steps in one phase."""
    return sum(step.phases_ns[phase] for step in one.breakdowns)


def worst_rank(analysis: Analysis, phase: str) -> tuple[RankAnalysis, int, float]:
    """The rank with the largest share of its wall time in a phase, that time, and that share."""
    ranks = list(analysis.ranks.values())
    shares = [phase_ns(one, phase) / max(wall_ns(one), 1) for one in ranks]
    worst = int(np.argmax(shares))
    return ranks[worst], phase_ns(ranks[worst], phase), shares[worst]


def longest_rows(one: RankAnalysis, rows: NDArray[np.int64]) -> tuple[Evidence, ...]:
    """The longest of these spans of a trace."""
    trace = one.trace
    top = rows[np.argsort(-trace.duration_ns[rows], kind="stable")[:MOST_EVIDENCE]]
    return tuple(
        Evidence(
            rank=one.rank, name=trace.name_of(row),
            start_ns=_common(one, int(trace.start_ns[row])),
            duration_ns=int(trace.duration_ns[row]),
        )
        for row in top.tolist()
    )  # fmt: skip


def longest_intervals(one: RankAnalysis, name: str, intervals: Intervals) -> tuple[Evidence, ...]:
    """The longest of these intervals, under a name."""
    length = intervals[:, 1] - intervals[:, 0]
    return tuple(
        Evidence(
            rank=one.rank, name=name, start_ns=_common(one, int(start)),
            duration_ns=int(end - start),
        )
        for start, end in intervals[np.argsort(-length, kind="stable")[:MOST_EVIDENCE]]
    )  # fmt: skip


def _common(one: RankAnalysis, instant_ns: int) -> int:
    if one.clock is None:
        return instant_ns
    return int(one.clock.correct(np.array([instant_ns]))[0])


def in_steps(activity: Activity, intervals: Intervals) -> Intervals:
    """What of the intervals lies inside of the recorded steps."""
    parts = [clip(intervals, step.start_ns, step.end_ns) for step in activity.steps]
    return np.concatenate(parts) if parts else intervals[:0]


def rows_in_steps(one: RankAnalysis, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those of the rows that begin inside of a recorded step."""
    start = one.trace.start_ns[rows]
    inside = np.zeros(len(rows), bool)
    for step in one.activity.steps:
        inside |= (start >= step.start_ns) & (start < step.end_ns)
    return rows[inside]


def rows_named(one: RankAnalysis, names: Iterable[bool]) -> NDArray[np.int64]:
    """Rows whose name's flag is set, inside of the recorded steps."""
    flags = np.array(list(names) or [False], bool)
    return rows_in_steps(one, np.flatnonzero(flags[one.trace.name]))
