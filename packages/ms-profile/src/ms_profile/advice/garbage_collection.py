"""Python's garbage collector stops a rank, and with it all others."""

from ms_profile.advice.finding import Finding, in_steps, longest_intervals, worst_rank
from ms_profile.analysis import Analysis

__all__ = ["garbage_collection"]

LEAST_SHARE = 0.01


def garbage_collection(analysis: Analysis) -> Finding | None:
    """Fire where collections take 1% or more of the wall time."""
    one, time_ns, share = worst_rank(analysis, "garbage")
    if share < LEAST_SHARE:
        return None
    pauses = in_steps(one.activity, one.activity.garbage)
    return Finding(
        rule="garbage_collection",
        title=f"Python's garbage collector takes {share:.1%} of rank {one.rank}'s time",
        advice="Call gc.freeze() after set-up and gc.disable(), and collect on all ranks at the "
        "same step, every few hundred steps.",
        gain_ns=time_ns,
        gain_share=share,
        evidence=longest_intervals(one, "garbage collection", pauses),
    )
