"""Split the wall time of each step of a rank among phases, counting every instant once.

With a device, its kernels are compute and the host's operators explain the device's idle time.
Without a device, the host's operators are compute.
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
    "compute": "operators, or kernels if there is a device",
    "collective": "communication not hidden by compute",
    "copy": "copies between host and device not hidden by other work",
    "garbage": "Python's garbage collector",
    "data": "waiting for the next batch",
    "synchronize": "the host waiting for the device",
    "launch": "the device idle while the host prepares its work",
    "host": "anything else: Python, other code, or waits that were not recorded",
}

COMMUNICATION_OPERATOR: Final = any_vendors("communication_operator")
DATA: Final = re.compile(r"enumerate\(DataLoader\)#|data_wait|DataLoader")
GARBAGE: Final = re.compile(r"gc generation|gc\.collect|garbage|GC$")
SYNCHRONIZE: Final = any_vendors("synchronizing_call")
HOST: Final = (Category.OPERATOR, Category.ANNOTATION, Category.RUNTIME, Category.PYTHON)
EMPTY: Final = np.zeros((0, 2), np.int64)


@frozen(kw_only=True, eq=False)
class Activity:
    """Intervals of one rank by phase, (N, 2) int64 ns; different phases may overlap."""

    compute: Intervals
    collective: Intervals
    copy: Intervals
    garbage: Intervals
    data: Intervals
    synchronize: Intervals
    launch: Intervals
    """Operators and driver calls on the host; empty without a device."""
    steps: tuple[Step, ...]
    has_device: bool
    unmeasured: tuple[str, ...] = ()
    """Phases that this trace cannot show; their time counts as "host"."""
    known_garbage: Intervals = EMPTY
    """The part of `garbage` that comes from the recorder rather than the trace."""

    @cached_property
    def parts(self) -> dict[str, Intervals]:
        """Disjoint intervals by phase: an instant belongs to the first phase that covers it."""
        covered = EMPTY
        parts = {}
        # The last phase, "host", is what remains; see `break_down`.
        for name in list(PHASES)[:-1]:
            intervals: Intervals = getattr(self, name)
            parts[name] = subtract(intervals, covered)
            covered = _join(covered, intervals)
        return parts

    def in_steps(self, intervals: Intervals) -> Intervals:
        """Return the part of the intervals inside the recorded steps."""
        return np.concatenate(
            [EMPTY, *(clip(intervals, step.start_ns, step.end_ns) for step in self.steps)]
        )


@frozen(kw_only=True)
class Breakdown:
    """Wall time of one rank in one step; the phases sum to exactly that time."""

    step: Step
    phases_ns: dict[str, int]
    """Time by phase, with the keys of `PHASES`."""
    communication_ns: int
    """All communication time, hidden or not."""
    hidden_ns: int
    """Communication time during which compute was running."""

    @property
    def hidden_share(self) -> float | None:
        """Share of communication hidden by compute; None without communication."""
        return self.hidden_ns / self.communication_ns if self.communication_ns else None


def find_activity(
    trace: Trace, garbage: Intervals | None = None, data: Intervals | None = None
) -> Activity:
    """Find the intervals of each phase.

    Args:
        trace: the rank's trace.
        garbage: garbage collections from the recorder, (N, 2) ns; None if not recorded.
        data: waits for batches from the recorder, (N, 2) ns; None if not recorded.
    """
    device = _spans(trace, trace.rows(Category.KERNEL))
    has_device = len(trace.rows(Category.KERNEL)) > 0
    host = _host_compute(trace)
    stalls = _join(_spans(trace, trace.named(DATA, *HOST)), EMPTY if data is None else data)
    known_garbage = EMPTY if garbage is None else garbage
    pauses = _join(_spans(trace, trace.named(GARBAGE, *HOST)), known_garbage)
    # With a recorder, no spans means no such pauses; without a recorder, pauses are unknown.
    unmeasured: tuple[str, ...] = () if has_device else ("copy", "synchronize", "launch")
    if garbage is None and not len(pauses):
        unmeasured += ("garbage",)
    if data is None and not len(stalls):
        unmeasured += ("data",)
    waits = _spans(trace, trace.named(SYNCHRONIZE, *HOST))
    runtime = _spans(trace, trace.rows(Category.RUNTIME))
    return Activity(
        compute=device if has_device else host,
        collective=_spans(trace, trace.rows(Category.COLLECTIVE)),
        copy=_spans(trace, trace.rows(Category.COPY)),
        garbage=pauses,
        data=stalls,
        synchronize=waits if has_device else EMPTY,
        launch=_join(host, runtime) if has_device else EMPTY,
        steps=find_steps(trace),
        has_device=has_device,
        unmeasured=unmeasured,
        known_garbage=known_garbage,
    )


def break_down(activity: Activity) -> tuple[Breakdown, ...]:
    """Split the wall time of each step among `PHASES`."""
    hidden = intersect(activity.collective, activity.compute)
    breakdowns = []
    for step in activity.steps:
        start, end = step.start_ns, step.end_ns
        phases = {
            name: length_ns(clip(intervals, start, end))
            for name, intervals in activity.parts.items()
        }
        # Not negative, as the parts are disjoint and clipped to the step.
        phases["host"] = step.duration_ns - sum(phases.values())
        breakdowns.append(
            Breakdown(
                step=step,
                phases_ns=phases,
                communication_ns=length_ns(clip(activity.collective, start, end)),
                hidden_ns=length_ns(clip(hidden, start, end)),
            )
        )
    return tuple(breakdowns)


def _host_compute(trace: Trace) -> Intervals:
    """Return the intervals of operators on any thread, without communication and data waits."""
    launching = trace.named(COMMUNICATION_OPERATOR, Category.OPERATOR)
    waiting = trace.named(DATA, Category.ANNOTATION)
    excluded = np.concatenate([launching, waiting, trace.rows(Category.COLLECTIVE)])
    is_excluded = np.zeros(len(trace), bool)
    is_excluded[excluded] = True
    operators = trace.rows(Category.OPERATOR)
    operators = operators[~is_excluded[operators]]
    parts = [EMPTY]
    # Per thread, as waiting on one thread does not hide the compute of another.
    for thread in np.unique(trace.thread[operators]):
        compute, other = (rows[trace.thread[rows] == thread] for rows in (operators, excluded))
        parts.append(subtract(_spans(trace, compute), _spans(trace, other)))
    return _join(*parts)


def _spans(trace: Trace, rows: NDArray[np.int64]) -> Intervals:
    start = trace.start_ns[rows]
    return union(start, start + trace.duration_ns[rows])


def _join(*parts: Intervals) -> Intervals:
    joined = np.concatenate(parts)
    return union(joined[:, 0], joined[:, 1])
