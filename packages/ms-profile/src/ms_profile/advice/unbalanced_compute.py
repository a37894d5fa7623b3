"""Some ranks, or pipeline stages, have more to compute than others."""

import numpy as np

from ms_profile.advice.finding import Finding, in_steps, longest_intervals, wall_ns
from ms_profile.analysis import Analysis

__all__ = ["unbalanced_compute"]

LEAST_RATIO = 1.15
LEAST_GAIN = 0.03


def unbalanced_compute(analysis: Analysis) -> Finding | None:
    """Fire where the busiest rank computes 15% more than the mean, in nearly every step."""
    ranks = list(analysis.ranks.values())
    steps = min(len(one.breakdowns) for one in ranks)
    if len(ranks) < 2 or not steps:
        return None
    table = np.array([[s.phases_ns["compute"] for s in one.breakdowns[:steps]] for one in ranks])
    busiest = int(table.sum(axis=1).argmax())
    mean = float(table.mean(axis=0).sum())
    excess = float(table[busiest].sum()) - mean
    always = float((table.argmax(axis=0) == busiest).mean())
    one = ranks[busiest]
    share = excess / max(wall_ns(one), 1)
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
