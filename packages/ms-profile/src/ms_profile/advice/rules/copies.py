"""Copies between host and device stand in the way of compute."""

from ms_profile.advice.finding import Finding, longest_rows, rows_in_steps, worst_rank
from ms_profile.analysis.whole_run import Analysis
from ms_profile.trace.columns import Category

__all__ = ["copies"]

LEAST_SHARE = 0.03


def copies(analysis: Analysis) -> Finding | None:
    """Fire where copies that no compute hides take 3% or more of the time."""
    one, time_ns, share = worst_rank(analysis, "copy")
    if share < LEAST_SHARE:
        return None
    return Finding(
        rule="copies",
        title=f"Copies that nothing hides take {share:.0%} of rank {one.rank}'s time",
        advice="Pin host memory and copy with non_blocking=True, on a stream of their own, a "
        "batch ahead; keep optimizer states where they are used.",
        gain_ns=time_ns,
        gain_share=share,
        evidence=longest_rows(one, rows_in_steps(one, one.trace.rows(Category.COPY))),
    )
