"""Training steps in a trace: `ProfilerStep#N` spans, or one step for the whole trace."""

import re
from typing import Final

import numpy as np
from attrs import frozen

from ms_profile.trace.columns import Trace
from ms_profile.vendors.category import Category

STEP: Final = re.compile(r"ProfilerStep#?\*?([0-9]{1,15})")


@frozen(kw_only=True)
class Step:
    """One step of one rank; times in ns of the trace's clock."""

    number: int | None
    """Step number; None if the trace marks no steps and this covers the whole trace."""
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """Duration of the step in ns."""
        return self.end_ns - self.start_ns


def find_steps(trace: Trace) -> tuple[Step, ...]:
    """Return the steps in time order; without step marks, one step covers the whole trace."""
    numbers = {
        code: int(match.group(1))
        for code, name in enumerate(trace.names)
        if (match := STEP.fullmatch(name))
    }
    rows = np.flatnonzero(
        np.isin(trace.name, list(numbers)) & (trace.category == Category.ANNOTATION)
    )
    steps = [
        Step(
            number=numbers[int(trace.name[row])],
            start_ns=int(trace.start_ns[row]),
            end_ns=int(trace.start_ns[row] + trace.duration_ns[row]),
        )
        for row in rows
    ]
    if steps:
        return tuple(sorted(steps, key=lambda step: step.start_ns))
    start, end = trace.span_ns
    return (Step(number=None, start_ns=start, end_ns=end),)
