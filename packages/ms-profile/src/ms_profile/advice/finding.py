"""Findings of the advice rules, and the spans that support them."""

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ms_profile.analysis.whole_run import RankAnalysis
from ms_profile.trace.intervals import Intervals

MAX_EVIDENCE = 5


@frozen(kw_only=True)
class Evidence:
    """One span that supports a finding."""

    rank: int
    name: str
    start_ns: int
    """Start on the lowest rank's clock, or on the rank's own clock if that is not aligned."""
    duration_ns: int


@frozen(kw_only=True)
class Finding:
    """One piece of advice."""

    rule: str
    """Name of the rule's module."""
    title: str
    """Observation, with its numbers."""
    advice: str
    """How to fix it."""
    gain_ns: float
    """Estimated time saved on the slowest rank over the recorded steps, in ns."""
    gain_share: float
    """`gain_ns` divided by the wall time of the recorded steps."""
    evidence: tuple[Evidence, ...]


def longest_rows(rank: RankAnalysis, rows: NDArray[np.int64]) -> tuple[Evidence, ...]:
    """Return the longest of these spans of a trace."""
    trace = rank.trace
    top = rows[np.argsort(-trace.duration_ns[rows], kind="stable")[:MAX_EVIDENCE]]
    return tuple(
        Evidence(
            rank=rank.rank, name=trace.name_of(row),
            start_ns=rank.common_ns(int(trace.start_ns[row])),
            duration_ns=int(trace.duration_ns[row]),
        )
        for row in top.tolist()
    )  # fmt: skip


def longest_intervals(rank: RankAnalysis, name: str, intervals: Intervals) -> tuple[Evidence, ...]:
    """Return the longest of these intervals as evidence with the given name."""
    length = intervals[:, 1] - intervals[:, 0]
    longest = intervals[np.argsort(-length, kind="stable")[:MAX_EVIDENCE]]
    return tuple(
        Evidence(rank=rank.rank, name=name, start_ns=rank.common_ns(start), duration_ns=end - start)
        for start, end in longest.tolist()
    )
