"""What a rank did at each instant: every step's wall time split among causes, none counted twice.

Where a device computes, its kernels are the compute and the host's operators explain its idle time;
without a device the host's operators are the compute.
"""

import re
from functools import cached_property
from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ms_profile.trace.columns import Trace
from ms_profile.trace.intervals import Intervals, clip, intersect, length_ns, subtract, union
from ms_profile.trace.steps import Step, find_steps
from ms_profile.vendors import any_vendors
from ms_profile.vendors.category import Category

PHASES: Final = {
    "compute": "operators, or kernels where there is a device",
    "collective": "communication that no compute hides",
    "copy": "copies between host and device that nothing hides",
    "garbage": "Python's garbage collector",
    "data": "waiting for the next batch",
    "synchronise": "the host waiting for the device",
    "launch": "the device idle while the host prepares its work",
    "host": "nothing of the above: Python, other code, or waiting that was not recorded",
}

COMMUNICATION_OPERATOR: Final = any_vendors("communication_operator")
DATA: Final = re.compile(r"enumerate\(DataLoader\)#|data_wait|DataLoader")
GARBAGE: Final = re.compile(r"gc generation|gc\.collect|garbage")
SYNCHRONISE: Final = any_vendors("synchronising_call")
HOST: Final = (Category.OPERATOR, Category.ANNOTATION, Category.RUNTIME, Category.PYTHON)
NOTHING: Final = np.zeros((0, 2), np.int64)


@frozen(kw_only=True, eq=False)
class Activity:
    """Intervals of one rank, (N, 2) int64 ns each; they may overlap one another."""

    compute: Intervals
    collective: Intervals
    copy: Intervals
    garbage: Intervals
    data: Intervals
    synchronise: Intervals
    launch: Intervals
    """The host's operators and driver calls; empty without a device."""
    steps: tuple[Step, ...]
    has_device: bool
    unmeasured: tuple[str, ...] = ()
    """Phases that this trace cannot show; their time counts as "host"."""
    known_garbage: Intervals = NOTHING
    """The part of `garbage` that was known from elsewhere and is no span of the trace."""

    @cached_property
    def parts(self) -> dict[str, Intervals]:
        """Intervals by phase, each instant in the first phase that claims it."""
        taken = NOTHING
        parts = {}
        for name in list(PHASES)[:-1]:
            own: Intervals = getattr(self, name)
            parts[name] = subtract(own, taken)
            taken = _join(taken, own)
        return parts

    def in_steps(self, intervals: Intervals) -> Intervals:
        """Return the part of the intervals that lies inside of the recorded steps."""
        return np.concatenate(
            [NOTHING, *(clip(intervals, step.start_ns, step.end_ns) for step in self.steps)]
        )


@frozen(kw_only=True)
class Breakdown:
    """Wall time of one rank in one step; the phases sum to it exactly."""

    step: Step
    phases_ns: dict[str, int]
    """Keys of `PHASES`."""
    communication_ns: int
    """All of it, hidden or not."""
    hidden_ns: int
    """Communication while compute went on."""

    @property
    def hidden_share(self) -> float | None:
        """Share of communication that compute hid; None where there was none."""
        return self.hidden_ns / self.communication_ns if self.communication_ns else None


def find_activity(
    trace: Trace, garbage: Intervals | None = None, data: Intervals | None = None
) -> Activity:
    """Find when each phase went on; `garbage` and `data` are intervals known from elsewhere."""
    device = _spans(trace, trace.rows(Category.KERNEL))
    has_device = len(trace.rows(Category.KERNEL)) > 0
    host = _host_compute(trace)
    stalls = _join(_spans(trace, trace.named(DATA, *HOST)), NOTHING if data is None else data)
    known_garbage = NOTHING if garbage is None else garbage
    pauses = _join(_spans(trace, trace.named(GARBAGE, *HOST)), known_garbage)
    unmeasured: tuple[str, ...] = () if has_device else ("copy", "synchronise", "launch")
    if garbage is None and not len(pauses):
        unmeasured += ("garbage",)
    if data is None and not len(stalls):
        unmeasured += ("data",)
    waits = _spans(trace, trace.named(SYNCHRONISE, *HOST))
    runtime = _spans(trace, trace.rows(Category.RUNTIME))
    return Activity(
        compute=device if has_device else host,
        collective=_spans(trace, trace.rows(Category.COLLECTIVE)),
        copy=_spans(trace, trace.rows(Category.COPY)),
        garbage=pauses,
        data=stalls,
        synchronise=waits if has_device else NOTHING,
        launch=_join(host, runtime) if has_device else NOTHING,
        steps=find_steps(trace),
        has_device=has_device,
        unmeasured=unmeasured,
        known_garbage=known_garbage,
    )


def break_down(activity: Activity) -> tuple[Breakdown, ...]:
    """Split each step's wall time among `PHASES`."""
    hidden = intersect(activity.collective, activity.compute)
    found = []
    for step in activity.steps:
        start, end = step.start_ns, step.end_ns
        phases = {name: length_ns(clip(own, start, end)) for name, own in activity.parts.items()}
        phases["host"] = step.duration_ns - sum(phases.values())
        found.append(
            Breakdown(
                step=step,
                phases_ns=phases,
                communication_ns=length_ns(clip(activity.collective, start, end)),
                hidden_ns=length_ns(clip(hidden, start, end)),
            )
        )
    return tuple(found)


def _host_compute(trace: Trace) -> Intervals:
    """Find where operators ran on any thread, but for communication launches and data waits."""
    launching = trace.named(COMMUNICATION_OPERATOR, Category.OPERATOR)
    waiting = trace.named(DATA, Category.ANNOTATION)
    away = np.concatenate([launching, waiting, trace.rows(Category.COLLECTIVE)])
    is_away = np.zeros(len(trace), bool)
    is_away[away] = True
    rows = trace.rows(Category.OPERATOR)
    rows = rows[~is_away[rows]]
    parts = [NOTHING]
    for thread in np.unique(trace.thread[rows]):
        busy, others = (own[trace.thread[own] == thread] for own in (rows, away))
        parts.append(subtract(_spans(trace, busy), _spans(trace, others)))
    return _join(*parts)


def _spans(trace: Trace, rows: NDArray[np.int64]) -> Intervals:
    start = trace.start_ns[rows]
    return union(start, start + trace.duration_ns[rows])


def _join(*parts: Intervals) -> Intervals:
    joined = np.concatenate(parts)
    return union(joined[:, 0], joined[:, 1])
