"""Many collectives are so small that their time is mostly latency."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from ms_profile.advice.finding import longest_rows
from ms_profile.advice.rule import Case, Rule
from ms_profile.analysis.whole_run import Analysis

SMALL_BYTES = 64 << 10
MIN_PER_STEP = 8


def find_cases(analysis: Analysis) -> Iterator[Case]:
    """Yield ranks with at least 8 collectives under 64 KiB per step; the gain is their transfer."""
    ledger = analysis.ledger
    sizes = [collective.size_bytes or 0 for collective in ledger.matched]
    small = [number for number, size in enumerate(sizes) if 0 < size < SMALL_BYTES]
    for rank in analysis.ranks.values():
        # Indices into the ledger of the small collectives that this rank took part in.
        local = [number for number in small if rank.rank in ledger.matched[number].rows]
        if local and len(local) >= MIN_PER_STEP * len(rank.breakdowns):
            rows = np.array([ledger.matched[n].rows[rank.rank] for n in local], np.int64)
            yield Case(
                rank=rank,
                gain_ns=float(sum(ledger.transfer_ns[n][rank.rank] for n in local)),
                evidence=longest_rows(rank, rows),
                numbers={"messages": len(local)},
            )


RULE: Final = Rule(
    name="small_messages",
    find_cases=find_cases,
    min_share=0.02,
    title="Rank {rank} takes part in {messages} collectives under 64 KiB in {steps} steps",
    advice="Send fewer, larger messages: larger DDP buckets, FSDP units of more layers, "
    "broadcast_buffers=False, metrics reduced together and not in every step.",
)
