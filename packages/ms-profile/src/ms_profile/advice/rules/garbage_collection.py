"""Python's garbage collector pauses a rank, and with it all others."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from ms_profile.advice.finding import longest_intervals
from ms_profile.advice.rule import Case, Rule
from ms_profile.analysis.whole_run import Analysis
from ms_profile.trace.intervals import clip

MIN_PAUSES = 2
"""Number of collections from which the rule fires; a single one may be chance."""


def find_cases(analysis: Analysis) -> Iterator[Case]:
    """Yield the ranks that garbage collection pauses more than once.

    The first traced step is skipped if there are others: starting the tracer creates objects, which
    a collection in that step then traverses.
    """
    for rank in analysis.ranks.values():
        breakdowns = rank.breakdowns[1:] or rank.breakdowns
        steps = [breakdown.step for breakdown in breakdowns]
        garbage = rank.activity.garbage
        pauses = np.concatenate([clip(garbage, step.start_ns, step.end_ns) for step in steps])
        if len(pauses) >= MIN_PAUSES:
            yield Case(
                rank=rank,
                gain_ns=sum(breakdown.phases_ns["garbage"] for breakdown in breakdowns),
                wall_ns=sum(step.duration_ns for step in steps),
                evidence=longest_intervals(rank, "garbage collection", pauses),
            )


RULE: Final = Rule(
    name="garbage_collection",
    find_cases=find_cases,
    min_share=0.01,
    title="Python's garbage collector takes {share:.1%} of rank {rank}'s time",
    advice="Call gc.freeze() and gc.disable() after setup, and collect on all ranks at the same "
    "step, every few hundred steps.",
)
