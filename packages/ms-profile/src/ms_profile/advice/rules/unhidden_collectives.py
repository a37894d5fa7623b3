"""Communication is exposed although compute could hide it."""

from collections.abc import Iterator
from typing import Final

from ms_profile.advice.finding import longest_rows
from ms_profile.advice.rule import Case, Rule, rows_in_steps
from ms_profile.analysis.whole_run import Analysis
from ms_profile.vendors.category import Category


def find_cases(analysis: Analysis) -> Iterator[Case]:
    """Yield exposed transfers, without the waits for other ranks."""
    waited = analysis.ledger.waited_ns()
    for rank in analysis.ranks.values():
        hidden = sum(step.hidden_ns for step in rank.breakdowns)
        total = sum(step.communication_ns for step in rank.breakdowns)
        yield Case(
            rank=rank,
            # Waits for late ranks would remain with perfect overlap, so they are not counted.
            gain_ns=max(rank.phase_ns("collective") - waited.get(rank.rank, 0.0), 0.0),
            evidence=longest_rows(rank, rows_in_steps(rank, rank.trace.rows(Category.COLLECTIVE))),
            numbers={"hidden": f"{hidden / total:.0%}" if hidden else "none"},
        )


RULE: Final = Rule(
    name="unhidden_collectives",
    find_cases=find_cases,
    min_share=0.10,
    title="Rank {rank} spends {share:.0%} of the time in transfers not hidden by compute; {hidden} "
    "of its communication is hidden",
    advice="Start communication earlier and overlap it with compute: prefetch in FSDP, DDP buckets "
    "of a suitable size, gradient accumulation with no_sync, sharding over fewer ranks.",
)
