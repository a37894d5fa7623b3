"""Many kernels are so short that launching them takes longer than running them."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from ms_profile.advice.finding import longest_rows
from ms_profile.advice.rule import Case, Rule, rows_in_steps
from ms_profile.analysis.whole_run import Analysis
from ms_profile.vendors.category import Category

SHORT_NS = 10_000
MIN_SHORT_SHARE = 0.5
"""Share of kernels that must be short for the rule to fire."""


def find_cases(analysis: Analysis) -> Iterator[Case]:
    """Yield ranks where most kernels take under 10 µs; the gain is the gaps after those."""
    for rank in analysis.ranks.values():
        rows = rows_in_steps(rank, rank.trace.rows(Category.KERNEL))
        start, thread = rank.trace.start_ns[rows], rank.trace.thread[rows]
        order = np.lexsort((start, thread))  # by stream, then start
        rows, start, thread = rows[order], start[order], thread[order]
        duration = rank.trace.duration_ns[rows]
        short = duration < SHORT_NS
        if len(rows) < 2 or short.mean() < MIN_SHORT_SHARE:
            continue
        # (N - 1,) idle time of the stream between a kernel and the next.
        gap = start[1:] - (start + duration)[:-1]
        lost = (thread[1:] == thread[:-1]) & short[:-1] & (gap > 0)
        yield Case(
            rank=rank,
            # Longer gaps have another cause than launching, such as a batch that is late.
            gain_ns=float(np.minimum(gap, 4 * SHORT_NS)[lost].sum()),
            evidence=longest_rows(rank, rows[short]),
            numbers={"short": float(short.mean()), "kernels": len(rows)},
        )


RULE: Final = Rule(
    name="small_kernels",
    find_cases=find_cases,
    min_share=0.03,
    title="{short:.0%} of the {kernels} kernels of rank {rank} take under 10 µs; the gaps after "
    "them add up",
    advice="Fuse them: torch.compile, a fused optimizer (fused=True), fused norms and losses, or a "
    "larger microbatch.",
)
