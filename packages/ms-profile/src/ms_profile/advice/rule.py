"""A rule of advice: what it looks for on each rank, how much of it is too much, and the remedy."""

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
    """What a rule sees on one rank."""

    one: RankAnalysis
    gain_ns: float
    """Time that the rank would save."""
    evidence: tuple[Evidence, ...]
    numbers: Mapping[str, float | str] = field(factory=dict)
    """What the rule's title and advice name beside `rank`, `steps` and `share`."""
    wall_ns: int | None = None
    """What the gain is a share of; the wall time of the rank's steps where not given."""

    @property
    def share(self) -> float:
        """The gain's share of the wall time."""
        return self.gain_ns / max(self.one.wall_ns if self.wall_ns is None else self.wall_ns, 1)


@frozen(kw_only=True)
class Rule:
    """One rule; its file holds it as `RULE`."""

    name: str
    """The file's."""
    look: Callable[[Analysis], Iterable[Case]]
    """Yields what is to be seen, at most one case a rank."""
    least_share: float
    """Share of the wall time from which the rule fires."""
    title: str
    """What was seen, with fields such as `{rank}` and `{share:.0%}`."""
    advice: str
    """What to do about it, likewise."""

    def __call__(self, analysis: Analysis) -> Finding | None:
        """Find the case with the largest share of its rank's time, if that is enough."""
        worst = max(self.look(analysis), key=lambda case: case.share, default=None)
        if worst is None or worst.share < self.least_share:
            return None
        one, share = worst.one, worst.share
        values = {"rank": one.rank, "steps": len(one.breakdowns), "share": share, **worst.numbers}
        return Finding(
            rule=self.name,
            title=self.title.format_map(values),
            advice=self.advice.format_map(values),
            gain_ns=worst.gain_ns,
            gain_share=share,
            evidence=worst.evidence,
        )


def phase_rule(
    name: str, phase: str, *, evidence: str | Category, least_share: float, title: str, advice: str
) -> Rule:
    """Make a rule against the time in one phase of `PHASES`.

    `evidence` is what stretches of that phase are called, or which of the trace's spans show it.
    """

    def look(analysis: Analysis) -> Iterator[Case]:
        for one in analysis.ranks.values():
            if isinstance(evidence, Category):
                longest = longest_rows(one, rows_in_steps(one, one.trace.rows(evidence)))
            else:
                stretches = one.activity.in_steps(one.activity.parts[phase])
                longest = longest_intervals(one, evidence, stretches)
            yield Case(one=one, gain_ns=one.phase_ns(phase), evidence=longest)

    return Rule(name=name, look=look, least_share=least_share, title=title, advice=advice)


def calls_rule(
    name: str, calls: re.Pattern[str], *, least_a_step: int, least_share: float, title: str,
    advice: str,
) -> Rule:  # fmt: skip
    """Make a rule against the time in calls of the driver, from so many a step on.

    `calls` is the pattern of their names; the title may name how many `{calls}` were made.
    """

    def look(analysis: Analysis) -> Iterator[Case]:
        for one in analysis.ranks.values():
            rows = rows_in_steps(one, one.trace.named(calls))
            if len(rows) >= least_a_step * len(one.breakdowns):
                yield Case(
                    one=one, gain_ns=int(one.trace.duration_ns[rows].sum()),
                    evidence=longest_rows(one, rows), numbers={"calls": len(rows)},
                )  # fmt: skip

    return Rule(name=name, look=look, least_share=least_share, title=title, advice=advice)


def rows_in_steps(one: RankAnalysis, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those of the rows that begin inside a recorded step."""
    start = one.trace.start_ns[rows]
    inside = np.zeros(len(rows), bool)
    for step in one.activity.steps:
        inside |= (start >= step.start_ns) & (start < step.end_ns)
    return rows[inside]
