"""The host stops to wait for the device in the middle of a step."""

from ms_profile.advice.finding import Finding, longest_rows, rows_named, wall_ns
from ms_profile.analysis.activity import SYNCHRONISE
from ms_profile.analysis.whole_run import Analysis

__all__ = ["synchronising_calls"]

LEAST_SHARE = 0.02
CALLS_A_STEP = 2


def synchronising_calls(analysis: Analysis) -> Finding | None:
    """Fire where waits for the device come twice a step or more and take 2% of the time."""
    best: Finding | None = None
    for one in analysis.ranks.values():
        if not one.activity.has_device:
            continue
        # What `item` waits in is such a call: both would count the time twice.
        calls = rows_named(
            one, (bool(SYNCHRONISE.match(n)) and "ynchronize" in n for n in one.trace.names)
        )
        time_ns = int(one.trace.duration_ns[calls].sum())
        share = time_ns / max(wall_ns(one), 1)
        if len(calls) < CALLS_A_STEP * len(one.breakdowns) or share < LEAST_SHARE:
            continue
        found = Finding(
            rule="synchronising_calls",
            title=f"Rank {one.rank} stops {len(calls)} times in {len(one.breakdowns)} steps to "
            "wait for its device",
            advice="Keep .item(), .cpu(), print and boolean masks out of the step; read the loss "
            "a step late.",
            gain_ns=time_ns,
            gain_share=share,
            evidence=longest_rows(one, calls),
        )
        best = found if best is None or found.gain_ns > best.gain_ns else best
    return best
