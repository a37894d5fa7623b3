"""Communication stands alone where compute could hide it."""

from collections.abc import Iterator
from typing import Final

from ms_profile.advice.finding import longest_rows
from ms_profile.advice.rule import Case, Rule, rows_in_steps
from ms_profile.analysis.whole_run import Analysis
from ms_profile.vendors.category import Category


def look(analysis: Analysis) -> Iterator[Case]:
    """Yield transfers that no compute hides, without waits for other ranks."""
    waited = analysis.ledger.waited_ns()
    for one in analysis.ranks.values():
        hidden = sum(step.hidden_ns for step in one.breakdowns)
        whole = sum(step.communication_ns for step in one.breakdowns)
        yield Case(
            one=one,
            gain_ns=max(one.phase_ns("collective") - waited.get(one.rank, 0.0), 0.0),
            evidence=longest_rows(one, rows_in_steps(one, one.trace.rows(Category.COLLECTIVE))),
            numbers={"hidden": f"{hidden / whole:.0%}" if hidden else "none"},
        )


RULE: Final = Rule(
    name="unhidden_collectives",
    look=look,
    least_share=0.10,
    title="Rank {rank} spends {share:.0%} of the time in transfers that no compute hides; {hidden} "
    "of its communication is hidden",
    advice="Start them earlier and let compute go on: prefetch in FSDP, DDP buckets of a fitting "
    "size, gradient accumulation without syncing, fewer ranks that shard.",
)
