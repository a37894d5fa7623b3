"""Some ranks, or pipeline stages, have more to compute than others."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from ms_profile.advice.finding import longest_intervals
from ms_profile.advice.rule import Case, Rule
from ms_profile.analysis.whole_run import Analysis

MIN_RATIO = 1.15
MIN_STEP_SHARE = 0.8
"""Share of the steps in which the same rank must be the busiest."""


def find_cases(analysis: Analysis) -> Iterator[Case]:
    """Yield the busiest rank if it computes 15% more than the mean in at least 80% of the steps."""
    ranks = list(analysis.ranks.values())
    steps = [{step.step.number: step for step in rank.breakdowns} for rank in ranks]
    shared = [number for number in steps[0] if all(number in by_number for by_number in steps)]
    if len(ranks) < 2 or not shared:
        return
    # (ranks, steps) compute time in ns.
    table = np.array(
        [[by_number[number].phases_ns["compute"] for number in shared] for by_number in steps]
    )
    sums = table.sum(axis=1)
    busiest, mean = int(sums.argmax()), float(sums.mean())
    step_share = float((table.argmax(axis=0) == busiest).mean())
    rank = ranks[busiest]
    if mean and sums[busiest] / mean >= MIN_RATIO and step_share >= MIN_STEP_SHARE:
        compute = rank.activity.in_steps(rank.activity.compute)
        yield Case(
            rank=rank,
            gain_ns=float(sums[busiest]) - mean,
            wall_ns=sum(steps[busiest][number].step.duration_ns for number in shared),
            evidence=longest_intervals(rank, "compute", compute),
            numbers={"more": sums[busiest] / mean - 1, "always": step_share},
        )


RULE: Final = Rule(
    name="unbalanced_compute",
    find_cases=find_cases,
    min_share=0.03,
    title="Rank {rank} computes {more:.0%} more than the mean rank, in {always:.0%} of the steps",
    advice="Move layers between stages, give the first and last stage fewer layers, pack sequences "
    "to equal work; if the work is equal, check that device's clock speed.",
)
