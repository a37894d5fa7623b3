"""The steps of training that a trace covers: `ProfilerStep#N`, else one window of all there is."""

import re
from typing import Final

import numpy as np
from attrs import frozen

from ms_profile.trace.columns import Trace
from ms_profile.vendors.category import Category

STEP: Final = re.compile(r"ProfilerStep#?\*?([0-9]{1,15})")


@frozen(kw_only=True)
class Step:
    """One step of one rank; instants in ns of the trace's clock."""

    number: int | None
    """None where the trace names no steps: then the window is the whole trace."""
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns


def find_steps(trace: Trace) -> tuple[Step, ...]:
    """Return the steps in order of time; a whole trace is one step where it names none."""
    numbers = {
        code: int(found.group(1))
        for code, name in enumerate(trace.names)
        if (found := STEP.fullmatch(name))
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
