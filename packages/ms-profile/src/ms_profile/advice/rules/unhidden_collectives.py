"""Communication stands alone where compute could hide it."""

from ms_profile.advice.finding import Finding, longest_rows, rows_in_steps, wall_ns, worst_rank
from ms_profile.analysis.whole_run import Analysis
from ms_profile.trace.columns import Category

__all__ = ["unhidden_collectives"]

LEAST_SHARE = 0.10


def unhidden_collectives(analysis: Analysis) -> Finding | None:
    """Fire where exposed transfer, waits for other ranks apart, takes a tenth or more."""
    one, exposed, _ = worst_rank(analysis, "collective")
    wall = max(wall_ns(one), 1)
    waited = analysis.ledger.waited_ns().get(one.rank, 0.0)
    transfer = max(exposed - waited, 0.0)
    if transfer / wall < LEAST_SHARE:
        return None
    rows = rows_in_steps(one, one.trace.rows(Category.COLLECTIVE))
    hidden = sum(step.hidden_ns for step in one.breakdowns)
    whole = max(sum(step.communication_ns for step in one.breakdowns), 1)
    return Finding(
        rule="unhidden_collectives",
        title=f"Rank {one.rank} spends {transfer / wall:.0%} of the time in transfers that no "
        f"compute hides; {f'{hidden / whole:.0%}' if hidden else 'none'} of its communication is "
        "hidden",
        advice="Start them earlier and let compute go on: prefetch in FSDP, DDP buckets of a "
        "fitting size, gradient accumulation without syncing, fewer ranks that shard.",
        gain_ns=transfer,
        gain_share=transfer / wall,
        evidence=longest_rows(one, rows),
    )
