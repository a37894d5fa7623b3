"""One rank makes the others wait."""

from ms_profile.advice.finding import Evidence, Finding, wall_ns
from ms_profile.analysis.ledger import name_suspect
from ms_profile.analysis.whole_run import Analysis

__all__ = ["stragglers"]

LEAST_SHARE = 0.03
LEAST_CONFIDENCE = 0.9


def stragglers(analysis: Analysis) -> Finding | None:
    """Fire where one rank is charged, with confidence, with 3% or more of the others' time."""
    ledger = analysis.ledger
    suspect = name_suspect(ledger)
    if suspect is None or suspect.confidence < LEAST_CONFIDENCE:
        return None
    own = [c for c in ledger.charges if (c.cause, c.phase) == (suspect.rank, suspect.phase)]
    by_rank: dict[int, float] = {}
    for charge in own:
        by_rank[charge.waiting] = by_rank.get(charge.waiting, 0.0) + charge.wait_ns
    waiting, waited = max(by_rank.items(), key=lambda item: item[1])
    share = waited / max(wall_ns(analysis.ranks[waiting]), 1)
    if share < LEAST_SHARE:
        return None
    longest = sorted(own, key=lambda charge: -charge.wait_ns)[:5]
    return Finding(
        rule="stragglers",
        title=f"Rank {suspect.rank} keeps the others waiting in its {suspect.phase} phase "
        f"(confidence {suspect.confidence:.0%})",
        advice=f"Look at what rank {suspect.rank} does there that others don't: its host, its "
        "data, its share of the model, its clock speed.",
        gain_ns=waited,
        gain_share=share,
        evidence=tuple(
            Evidence(
                rank=charge.waiting,
                name=f"wait in {ledger.meetings[charge.meeting].kind}",
                start_ns=ledger.meetings[charge.meeting].starts_ns[charge.waiting],
                duration_ns=round(charge.wait_ns),
            )
            for charge in longest
        ),
    )
