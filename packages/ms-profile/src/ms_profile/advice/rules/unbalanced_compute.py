"""Some ranks, or pipeline stages, have more to compute than others."""

import numpy as np

from ms_profile.advice.finding import Finding, in_steps, longest_intervals
from ms_profile.analysis.whole_run import Analysis

__all__ = ["unbalanced_compute"]

LEAST_RATIO = 1.15
LEAST_GAIN = 0.03


def unbalanced_compute(analysis: Analysis) -> Finding | None:
    """Fire where the busiest rank computes 15% more than the mean, in nearly every step."""
    ranks = list(analysis.ranks.values())
    steps = [{step.step.number: step for step in one.breakdowns} for one in ranks]
    shared = [number for number in steps[0] if all(number in own for own in steps)]
    if len(ranks) < 2 or not shared:
        return None
    table = np.array([[own[number].phases_ns["compute"] for number in shared] for own in steps])
    busiest = int(table.sum(axis=1).argmax())
    mean = float(table.mean(axis=0).sum())
    excess = float(table[busiest].sum()) - mean
    always = float((table.argmax(axis=0) == busiest).mean())
    one = ranks[busiest]
    wall = sum(steps[busiest][number].step.duration_ns for number in shared)
    share = excess / max(wall, 1)
    if not mean or table[busiest].sum() / mean < LEAST_RATIO or always < 0.8 or share < LEAST_GAIN:
        return None
    return Finding(
        rule="unbalanced_compute",
        title=f"Rank {one.rank} computes {table[busiest].sum() / mean - 1:.0%} more than the mean "
        f"rank, in {always:.0%} of the steps",
        advice="Move layers between stages, give the first and last stage fewer of them, pack "
        "sequences to equal work; on equal work, look at that device's clock speed.",
        gain_ns=excess,
        gain_share=share,
        evidence=longest_intervals(one, "compute", in_steps(one.activity, one.activity.compute)),
    )
