"""What a rank did at each instant: every step's wall time split among causes, none counted twice.

Where a device computes, its kernels are the compute and the host's operators explain its idle time;
without a device the host's operators are the compute.
"""

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ms_profile.trace.columns import Category, Trace
from ms_profile.trace.intervals import Intervals, clip, intersect, length_ns, subtract, union
from ms_profile.trace.steps import Step, find_steps

__all__ = ["DATA", "PHASES", "Activity", "Breakdown", "break_down", "find_activity"]

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

COMMUNICATION_OPERATOR: Final = re.compile(r"c10d::|_?c10d_functional|record_param_comms|nccl:")
DATA: Final = re.compile(r"enumerate\(DataLoader\)#|data_wait|DataLoader")
GARBAGE: Final = re.compile(r"gc generation|gc\.collect|garbage")
SYNCHRONISE: Final = re.compile(
    r"(cuda|acl|hip)\w*Synchronize\w*|aclrtSynchronize\w*|aten::(item|_local_scalar_dense)$"
)
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
    """Of `garbage`, what was known from elsewhere and is no span of the trace."""

    def partition(self) -> dict[str, Intervals]:
        """Intervals by phase, each instant in the first phase that claims it."""
        taken = NOTHING
        parts = {}
        for name in list(PHASES)[:-1]:
            own: Intervals = getattr(self, name)
            parts[name] = subtract(own, taken)
            taken = _join(taken, own)
        return parts


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
    """Sort out what a trace shows; `garbage` and `data` are intervals known from elsewhere."""
    device = trace.rows(Category.KERNEL)
    has_device = len(device) > 0
    host = _host_compute(trace)
    stalls = _join(_flagged(trace, DATA), NOTHING if data is None else data)
    pauses = _join(_flagged(trace, GARBAGE), NOTHING if garbage is None else garbage)
    unmeasured: tuple[str, ...] = () if has_device else ("copy", "synchronise", "launch")
    if garbage is None and not len(pauses):
        unmeasured += ("garbage",)
    if data is None and not len(stalls):
        unmeasured += ("data",)
    runtime = _spans(trace, trace.rows(Category.RUNTIME))
    return Activity(
        compute=_spans(trace, device) if has_device else host,
        collective=_spans(trace, trace.rows(Category.COLLECTIVE)),
        copy=_spans(trace, trace.rows(Category.COPY)),
        garbage=pauses,
        data=stalls,
        synchronise=_flagged(trace, SYNCHRONISE) if has_device else NOTHING,
        launch=_join(host, runtime) if has_device else NOTHING,
        steps=find_steps(trace),
        has_device=has_device,
        unmeasured=unmeasured,
        known_garbage=NOTHING if garbage is None else garbage,
    )


def break_down(activity: Activity, steps: Sequence[Step] | None = None) -> tuple[Breakdown, ...]:
    """Split each step's wall time among `PHASES`."""
    parts = activity.partition()
    hidden = intersect(activity.collective, activity.compute)
    found = []
    for step in activity.steps if steps is None else steps:
        start, end = step.start_ns, step.end_ns
        phases = {name: length_ns(clip(own, start, end)) for name, own in parts.items()}
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
    """Where operators ran on any thread, but for those that only launch communication."""
    rows = trace.rows(Category.OPERATOR)
    launching = _matching(trace, COMMUNICATION_OPERATOR)[trace.name[rows]]
    waiting = trace.rows(Category.ANNOTATION)
    waiting = waiting[_matching(trace, DATA)[trace.name[waiting]]]
    parts = []
    for thread in np.unique(trace.thread[rows]):
        here = trace.thread[rows] == thread
        busy = _spans(trace, rows[here & ~launching])
        away = np.concatenate([rows[here & launching], waiting[trace.thread[waiting] == thread]])
        if (carried := _collectives_of(trace, thread)) is not None:
            away = np.concatenate([away, carried])
        parts.append(subtract(busy, _spans(trace, away)))
    return _join(*parts) if parts else NOTHING


def _collectives_of(trace: Trace, thread: int) -> NDArray[np.int64] | None:
    rows = trace.rows(Category.COLLECTIVE)
    rows = rows[trace.thread[rows] == thread]
    return rows if len(rows) else None


def _matching(trace: Trace, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    return np.array([pattern.match(name) is not None for name in trace.names] or [False], bool)


def _flagged(trace: Trace, pattern: re.Pattern[str]) -> Intervals:
    """Host spans whose name matches."""
    host = trace.rows(Category.OPERATOR, Category.ANNOTATION, Category.RUNTIME, Category.PYTHON)
    return _spans(trace, host[_matching(trace, pattern)[trace.name[host]]])


def _spans(trace: Trace, rows: NDArray[np.int64]) -> Intervals:
    start = trace.start_ns[rows]
    return union(start, start + trace.duration_ns[rows])


def _join(*parts: Intervals) -> Intervals:
    joined = np.concatenate(parts)
    return union(joined[:, 0], joined[:, 1])
