"""Some ranks, or pipeline stages, have more to compute than others."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from ms_profile.advice.finding import longest_intervals
from ms_profile.advice.rule import Case, Rule
from ms_profile.analysis.whole_run import Analysis

LEAST_RATIO = 1.15
LEAST_ALWAYS = 0.8
"""Share of the steps in which it must be the same rank."""


def look(analysis: Analysis) -> Iterator[Case]:
    """Yield the busiest rank, if it computes 15% more than the mean, in nearly every step."""
    ranks = list(analysis.ranks.values())
    steps = [{step.step.number: step for step in one.breakdowns} for one in ranks]
    shared = [number for number in steps[0] if all(number in own for own in steps)]
    if len(ranks) < 2 or not shared:
        return
    table = np.array([[own[number].phases_ns["compute"] for number in shared] for own in steps])
    sums = table.sum(axis=1)
    busiest, mean = int(sums.argmax()), float(sums.mean())
    always = float((table.argmax(axis=0) == busiest).mean())
    one = ranks[busiest]
    if mean and sums[busiest] / mean >= LEAST_RATIO and always >= LEAST_ALWAYS:
        compute = one.activity.in_steps(one.activity.compute)
        yield Case(
            one=one,
            gain_ns=float(sums[busiest]) - mean,
            wall_ns=sum(steps[busiest][number].step.duration_ns for number in shared),
            evidence=longest_intervals(one, "compute", compute),
            numbers={"more": sums[busiest] / mean - 1, "always": always},
        )


RULE: Final = Rule(
    name="unbalanced_compute",
    look=look,
    least_share=0.03,
    title="Rank {rank} computes {more:.0%} more than the mean rank, in {always:.0%} of the steps",
    advice="Move layers between stages, give the first and last stage fewer of them, pack "
    "sequences to equal work; on equal work, look at that device's clock speed.",
)
