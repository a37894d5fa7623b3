"""Many kernels are so short that launching them costs more than running them."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from ms_profile.advice.finding import longest_rows
from ms_profile.advice.rule import Case, Rule, rows_in_steps
from ms_profile.analysis.whole_run import Analysis
from ms_profile.vendors.category import Category

SHORT_NS = 10_000
LEAST_SHORT = 0.5
"""Share of the kernels that must be short."""


def look(analysis: Analysis) -> Iterator[Case]:
    """Yield the gaps after kernels of under 10 µs, of ranks most of whose kernels are so short."""
    for one in analysis.ranks.values():
        rows = rows_in_steps(one, one.trace.rows(Category.KERNEL))
        start, thread = one.trace.start_ns[rows], one.trace.thread[rows]
        order = np.lexsort((start, thread))
        rows, start, thread = rows[order], start[order], thread[order]
        duration = one.trace.duration_ns[rows]
        short = duration < SHORT_NS
        if len(rows) < 2 or short.mean() < LEAST_SHORT:
            continue
        gap = start[1:] - (start + duration)[:-1]
        lost = (thread[1:] == thread[:-1]) & short[:-1] & (gap > 0)
        yield Case(
            one=one,
            gain_ns=float(np.minimum(gap, 4 * SHORT_NS)[lost].sum()),
            evidence=longest_rows(one, rows[short]),
            numbers={"short": float(short.mean()), "kernels": len(rows)},
        )


RULE: Final = Rule(
    name="small_kernels",
    look=look,
    least_share=0.03,
    title="{short:.0%} of the {kernels} kernels of rank {rank} last under 10 µs; the gaps after "
    "them add up",
    advice="Fuse them: torch.compile, a fused optimizer (fused=True), fused norms and losses, a "
    "larger microbatch.",
)
