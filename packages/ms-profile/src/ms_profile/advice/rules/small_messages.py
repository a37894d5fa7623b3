"""Many collectives are so small that latency is all that they cost."""

import numpy as np

from ms_profile.advice.finding import Finding, longest_rows, wall_ns
from ms_profile.analysis.whole_run import Analysis

__all__ = ["small_messages"]

SMALL_BYTES = 64 << 10
LEAST_A_STEP = 8
LEAST_GAIN = 0.02


def small_messages(analysis: Analysis) -> Finding | None:
    """Fire where 8 or more collectives a step carry under 64 KiB and take 2% of the time."""
    ledger = analysis.ledger
    for one in analysis.ranks.values():
        small = [
            number
            for number, met in enumerate(ledger.meetings)
            if met.size_bytes is not None
            and 0 < met.size_bytes < SMALL_BYTES
            and one.rank in met.rows
        ]
        steps = len(one.breakdowns)
        transfer = float(sum(ledger.transfer_ns[n][one.rank] for n in small))
        share = transfer / max(wall_ns(one), 1)
        if len(small) < LEAST_A_STEP * steps or share < LEAST_GAIN:
            continue
        rows = np.array([ledger.meetings[n].rows[one.rank] for n in small], np.int64)
        return Finding(
            rule="small_messages",
            title=f"Rank {one.rank} takes part in {len(small)} collectives under 64 KiB in "
            f"{steps} steps",
            advice="Send fewer and larger ones: larger DDP buckets, FSDP units of more layers, "
            "broadcast_buffers=False, metrics reduced together and not every step.",
            gain_ns=transfer,
            gain_share=share,
            evidence=longest_rows(one, rows),
        )
    return None
