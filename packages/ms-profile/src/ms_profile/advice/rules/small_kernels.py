"""Many kernels are so short that launching them costs more than running them."""

import numpy as np

from ms_profile.advice.finding import Finding, longest_rows, rows_in_steps, wall_ns
from ms_profile.analysis.whole_run import Analysis
from ms_profile.trace.columns import Category

__all__ = ["small_kernels"]

SHORT_NS = 10_000
LEAST_SHARE = 0.5
LEAST_GAIN = 0.03


def small_kernels(analysis: Analysis) -> Finding | None:
    """Fire where most kernels last under 10 µs and the gaps after them cost 3% or more."""
    best: Finding | None = None
    for one in analysis.ranks.values():
        rows = rows_in_steps(one, one.trace.rows(Category.KERNEL))
        if len(rows) < 2:
            continue
        rows = rows[np.lexsort((one.trace.start_ns[rows], one.trace.thread[rows]))]
        duration = one.trace.duration_ns[rows]
        short = duration < SHORT_NS
        start = one.trace.start_ns[rows]
        gap = start[1:] - (start + duration)[:-1]
        same = one.trace.thread[rows][1:] == one.trace.thread[rows][:-1]
        lost = np.where(same & short[:-1] & (gap > 0), np.minimum(gap, 4 * SHORT_NS), 0).sum()
        share = float(lost) / max(wall_ns(one), 1)
        if short.mean() < LEAST_SHARE or share < LEAST_GAIN:
            continue
        found = Finding(
            rule="small_kernels",
            title=f"{short.mean():.0%} of the {len(rows)} kernels of rank {one.rank} last under "
            "10 µs; the gaps after them add up",
            advice="Fuse them: torch.compile, a fused optimizer (fused=True), fused norms and "
            "losses, a larger microbatch.",
            gain_ns=float(lost),
            gain_share=share,
            evidence=longest_rows(one, rows[short]),
        )
        best = found if best is None or found.gain_ns > best.gain_ns else best
    return best
