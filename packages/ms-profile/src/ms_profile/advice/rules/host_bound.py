"""The device idles because the host launches its work too slowly."""

from ms_profile.advice.finding import Finding, in_steps, longest_intervals, worst_rank
from ms_profile.analysis.whole_run import Analysis

__all__ = ["host_bound"]

LEAST_SHARE = 0.10


def host_bound(analysis: Analysis) -> Finding | None:
    """Fire where the device waits for launches for a tenth of the wall time or more."""
    one, time_ns, share = worst_rank(analysis, "launch")
    if not one.activity.has_device or share < LEAST_SHARE:
        return None
    gaps = in_steps(one.activity, one.activity.partition()["launch"])
    return Finding(
        rule="host_bound",
        title=f"The device of rank {one.rank} idles {share:.0%} of the time while the host "
        "prepares work",
        advice="Launch less, or less often: torch.compile, CUDA graphs, larger batches, fused "
        "optimizers; take logging out of the step.",
        gain_ns=time_ns,
        gain_share=share,
        evidence=longest_intervals(one, "device idle, host launching", gaps),
    )
