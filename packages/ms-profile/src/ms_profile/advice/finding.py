"""What a rule found, and the events that it rests on."""

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ms_profile.analysis.whole_run import RankAnalysis
from ms_profile.trace.intervals import Intervals

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
    """What was seen, with its numbers."""
    advice: str
    """What to do about it."""
    gain_ns: float
    """Estimated time that it would save, on the slowest rank, over the recorded steps."""
    gain_share: float
    """The same as a share of those steps' wall time."""
    evidence: tuple[Evidence, ...]


def longest_rows(one: RankAnalysis, rows: NDArray[np.int64]) -> tuple[Evidence, ...]:
    """Return the longest of these spans of a trace."""
    trace = one.trace
    top = rows[np.argsort(-trace.duration_ns[rows], kind="stable")[:MOST_EVIDENCE]]
    return tuple(
        Evidence(
            rank=one.rank, name=trace.name_of(row),
            start_ns=one.common_ns(int(trace.start_ns[row])),
            duration_ns=int(trace.duration_ns[row]),
        )
        for row in top.tolist()
    )  # fmt: skip


def longest_intervals(one: RankAnalysis, name: str, intervals: Intervals) -> tuple[Evidence, ...]:
    """Return the longest of these intervals, under a name."""
    length = intervals[:, 1] - intervals[:, 0]
    longest = intervals[np.argsort(-length, kind="stable")[:MOST_EVIDENCE]]
    return tuple(
        Evidence(rank=one.rank, name=name, start_ns=one.common_ns(start), duration_ns=end - start)
        for start, end in longest.tolist()
    )
