"""One rank makes the others wait."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from ms_profile.advice.finding import Evidence
from ms_profile.advice.rule import Case, Rule
from ms_profile.analysis.whole_run import Analysis

MIN_CONFIDENCE = 0.9
MAX_EVIDENCE = 5


def find_cases(analysis: Analysis) -> Iterator[Case]:
    """Yield the rank that waits longest for the straggler, if that is known with confidence."""
    ledger, suspect = analysis.ledger, analysis.ledger.suspect
    if suspect is None or suspect.confidence < MIN_CONFIDENCE:
        return
    charges = [c for c in ledger.charges if (c.cause, c.phase) == (suspect.rank, suspect.phase)]
    waited: dict[int, float] = defaultdict(float)
    for charge in charges:
        waited[charge.waiting] += charge.wait_ns
    # The gain is what the rank that waits longest would save.
    waiting = max(waited, key=lambda rank: waited[rank])
    yield Case(
        rank=analysis.ranks[waiting],
        gain_ns=waited[waiting],
        numbers={
            "rank": suspect.rank, "phase": suspect.phase, "confidence": suspect.confidence,
        },
        evidence=tuple(
            Evidence(
                rank=charge.waiting,
                name=f"wait in {ledger.matched[charge.collective].kind}",
                start_ns=ledger.matched[charge.collective].starts_ns[charge.waiting],
                duration_ns=round(charge.wait_ns),
            )
            for charge in sorted(charges, key=lambda charge: -charge.wait_ns)[:MAX_EVIDENCE]
        ),
    )  # fmt: skip


RULE: Final = Rule(
    name="stragglers",
    find_cases=find_cases,
    min_share=0.03,
    title="Rank {rank} keeps the others waiting in its {phase} phase (confidence {confidence:.0%})",
    advice="Find out how rank {rank} differs from the others in that phase: its host, its data, "
    "its share of the model, its clock speed.",
)
