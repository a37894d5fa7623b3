"""Many collectives are so small that latency is all that they cost."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from ms_profile.advice.finding import longest_rows
from ms_profile.advice.rule import Case, Rule
from ms_profile.analysis.whole_run import Analysis

SMALL_BYTES = 64 << 10
LEAST_A_STEP = 8


def look(analysis: Analysis) -> Iterator[Case]:
    """Yield transfers of collectives under 64 KiB, of ranks that have 8 of them a step or more."""
    ledger = analysis.ledger
    sizes = [met.size_bytes or 0 for met in ledger.matched]
    small = [number for number, size in enumerate(sizes) if 0 < size < SMALL_BYTES]
    for one in analysis.ranks.values():
        own = [number for number in small if one.rank in ledger.matched[number].rows]
        if own and len(own) >= LEAST_A_STEP * len(one.breakdowns):
            rows = np.array([ledger.matched[n].rows[one.rank] for n in own], np.int64)
            yield Case(
                one=one,
                gain_ns=float(sum(ledger.transfer_ns[n][one.rank] for n in own)),
                evidence=longest_rows(one, rows),
                numbers={"messages": len(own)},
            )


RULE: Final = Rule(
    name="small_messages",
    look=look,
    least_share=0.02,
    title="Rank {rank} takes part in {messages} collectives under 64 KiB in {steps} steps",
    advice="Send fewer and larger ones: larger DDP buckets, FSDP units of more layers, "
    "broadcast_buffers=False, metrics reduced together and not every step.",
)
