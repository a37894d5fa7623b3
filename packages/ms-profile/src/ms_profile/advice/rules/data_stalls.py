"""Training waits for its next batch."""

from ms_profile.advice.finding import Finding, in_steps, longest_intervals, worst_rank
from ms_profile.analysis.whole_run import Analysis

__all__ = ["data_stalls"]

LEAST_SHARE = 0.03


def data_stalls(analysis: Analysis) -> Finding | None:
    """Fire where 3% or more of the wall time passes in the data loader and nothing else runs."""
    one, time_ns, share = worst_rank(analysis, "data")
    if share < LEAST_SHARE:
        return None
    stalls = in_steps(one.activity, one.activity.partition()["data"])
    return Finding(
        rule="data_stalls",
        title=f"Rank {one.rank} waits {share:.0%} of the time for its next batch",
        advice="Load ahead: more DataLoader workers, a larger prefetch_factor, pinned memory, "
        "batches tokenized and packed beforehand.",
        gain_ns=time_ns,
        gain_share=share,
        evidence=longest_intervals(one, "waiting for a batch", stalls),
    )
