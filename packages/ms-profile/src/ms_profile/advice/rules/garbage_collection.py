"""Python's garbage collector stops a rank, and with it all others."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from ms_profile.advice.finding import longest_intervals
from ms_profile.advice.rule import Case, Rule
from ms_profile.analysis.whole_run import Analysis
from ms_profile.trace.intervals import clip

LEAST_PAUSES = 2
"""Collections from which on the rule fires, as a single one may be chance."""


def look(analysis: Analysis) -> Iterator[Case]:
    """Yield the ranks that garbage collection stops more than once.

    The first traced step is left out where there are others: starting the tracer makes objects of
    its own, which a collection in that step then looks through.
    """
    for one in analysis.ranks.values():
        judged = one.breakdowns[1:] or one.breakdowns
        steps = [breakdown.step for breakdown in judged]
        garbage = one.activity.garbage
        pauses = np.concatenate([clip(garbage, step.start_ns, step.end_ns) for step in steps])
        if len(pauses) >= LEAST_PAUSES:
            yield Case(
                one=one,
                gain_ns=sum(breakdown.phases_ns["garbage"] for breakdown in judged),
                wall_ns=sum(step.duration_ns for step in steps),
                evidence=longest_intervals(one, "garbage collection", pauses),
            )


RULE: Final = Rule(
    name="garbage_collection",
    look=look,
    least_share=0.01,
    title="Python's garbage collector takes {share:.1%} of rank {rank}'s time",
    advice="Call gc.freeze() after set-up and gc.disable(), and collect on all ranks at the same "
    "step, every few hundred steps.",
)
