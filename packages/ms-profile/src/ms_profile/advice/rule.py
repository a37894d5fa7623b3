"""Advice rules: the pattern to look for on each rank, its threshold, and the remedy."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from ms_profile.advice.finding import Evidence, Finding, longest_intervals, longest_rows
from ms_profile.analysis.whole_run import Analysis, RankAnalysis
from ms_profile.vendors.category import Category


@frozen(kw_only=True)
class Case:
    """Observation of a rule on one rank."""

    rank: RankAnalysis
    gain_ns: float
    """Time that the rank would save, in ns."""
    evidence: tuple[Evidence, ...]
    numbers: Mapping[str, float | str] = field(factory=dict)
    """Values for the title and advice, in addition to `rank`, `steps` and `share`."""
    wall_ns: int | None = None
    """Time that the gain is a share of. None: the wall time of the rank's steps."""

    @property
    def share(self) -> float:
        """The gain as a share of the wall time."""
        return self.gain_ns / max(self.rank.wall_ns if self.wall_ns is None else self.wall_ns, 1)


@frozen(kw_only=True)
class Rule:
    """An advice rule; each module in `advice.rules` defines one as `RULE`."""

    name: str
    """Name of the rule's module."""
    find_cases: Callable[[Analysis], Iterable[Case]]
    """Yield at most one case per rank."""
    min_share: float
    """Smallest share of the wall time at which the rule fires."""
    title: str
    """Observation, with format fields such as `{rank}` and `{share:.0%}`."""
    advice: str
    """Remedy, with the same format fields."""

    def __call__(self, analysis: Analysis) -> Finding | None:
        """Return the case with the largest share of its rank's time, if it exceeds `min_share`."""
        worst = max(self.find_cases(analysis), key=lambda case: case.share, default=None)
        if worst is None or worst.share < self.min_share:
            return None
        rank, share = worst.rank, worst.share
        values = {"rank": rank.rank, "steps": len(rank.breakdowns), "share": share, **worst.numbers}
        return Finding(
            rule=self.name,
            title=self.title.format_map(values),
            advice=self.advice.format_map(values),
            gain_ns=worst.gain_ns,
            gain_share=share,
            evidence=worst.evidence,
        )


def phase_rule(
    name: str, phase: str, *, evidence: str | Category, min_share: float, title: str, advice: str
) -> Rule:
    """Create a rule about the time spent in one phase.

    Args:
        name: name of the rule.
        phase: key of `PHASES`.
        evidence: category of the trace spans to cite, or a name under which to cite the intervals
            of the phase.
        min_share: share of the wall time at which the rule fires.
        title: observation, a format string.
        advice: remedy, a format string.
    """

    def find_cases(analysis: Analysis) -> Iterator[Case]:
        for rank in analysis.ranks.values():
            if isinstance(evidence, Category):
                longest = longest_rows(rank, rows_in_steps(rank, rank.trace.rows(evidence)))
            else:
                intervals = rank.activity.in_steps(rank.activity.parts[phase])
                longest = longest_intervals(rank, evidence, intervals)
            yield Case(rank=rank, gain_ns=rank.phase_ns(phase), evidence=longest)

    return Rule(name=name, find_cases=find_cases, min_share=min_share, title=title, advice=advice)


def calls_rule(
    name: str, calls: re.Pattern[str], *, min_per_step: int, min_share: float, title: str,
    advice: str,
) -> Rule:  # fmt: skip
    """Create a rule about the time spent in certain driver calls.

    Args:
        name: name of the rule.
        calls: pattern of the names of the calls.
        min_per_step: number of calls per step from which the rule fires.
        min_share: share of the wall time at which the rule fires.
        title: observation, a format string; `{calls}` is the number of calls.
        advice: remedy, a format string.
    """

    def find_cases(analysis: Analysis) -> Iterator[Case]:
        for rank in analysis.ranks.values():
            rows = rows_in_steps(rank, rank.trace.named(calls))
            if len(rows) >= min_per_step * len(rank.breakdowns):
                yield Case(
                    rank=rank, gain_ns=int(rank.trace.duration_ns[rows].sum()),
                    evidence=longest_rows(rank, rows), numbers={"calls": len(rows)},
                )  # fmt: skip

    return Rule(name=name, find_cases=find_cases, min_share=min_share, title=title, advice=advice)


def rows_in_steps(rank: RankAnalysis, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows whose spans start inside a recorded step."""
    start = rank.trace.start_ns[rows]
    inside = np.zeros(len(rows), bool)
    for step in rank.activity.steps:
        inside |= (start >= step.start_ns) & (start < step.end_ns)
    return rows[inside]
