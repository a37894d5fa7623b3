"""The device's allocator goes to the driver in the middle of a step."""

import re

from ms_profile.advice.finding import Finding, longest_rows, rows_named, wall_ns
from ms_profile.analysis.whole_run import Analysis

__all__ = ["device_allocations"]

ALLOCATION = re.compile(
    r"(cuda|hip)(Malloc|Free)(Async|Host)?$|(cuda|hip)HostAlloc$|aclrt(Malloc|Free)\w*$|"
    r"cuMem(Alloc|Free|Create|Release|Map|Unmap|SetAccess|AddressReserve|AddressFree)\w*$"
)
LEAST_SHARE = 0.01


def device_allocations(analysis: Analysis) -> Finding | None:
    """Fire where allocations by the driver take 1% or more of the recorded steps."""
    best: Finding | None = None
    for one in analysis.ranks.values():
        rows = rows_named(one, (ALLOCATION.match(n) is not None for n in one.trace.names))
        time_ns = int(one.trace.duration_ns[rows].sum())
        share = time_ns / max(wall_ns(one), 1)
        if share < LEAST_SHARE:
            continue
        found = Finding(
            rule="device_allocations",
            title=f"Rank {one.rank} asks the driver for memory {len(rows)} times in "
            f"{len(one.breakdowns)} steps",
            advice="Keep shapes the same from step to step, set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True, leave empty_cache() out of the loop.",
            gain_ns=time_ns,
            gain_share=share,
            evidence=longest_rows(one, rows),
        )
        best = found if best is None or found.gain_ns > best.gain_ns else best
    return best
