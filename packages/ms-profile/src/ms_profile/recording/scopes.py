"""Record collectives and their durations cheaply: Kineto restricted to user scopes.

Every Work of a process group opens a user scope (`gloo:all_reduce`), as do DataLoader, optimizers,
DDP and FSDP; operators do not. A step therefore has a handful of records instead of thousands, and
DDP's backward communication, which Python hooks miss, is included. Records are moved into the ring
at a step boundary, at most every other second, and less often where that would exceed the time
budget, so a slow host pays no more than a fast one.

If a scope is open when one Kineto session ends and another starts before the scope closes, torch
writes the scope's end into freed memory. So sessions are at least one step apart, which lets scopes
around a boundary close; if the script keeps a scope open over many steps, recording stops for the
rest of the run. The scope of a Work ends on a thread of its group and remembers its session, so it
needs no such distance. Sessions end right after a weight update, when no message is in flight; at
the start of a step, a pipeline stage may already have posted its first receive.

Only torch's internal profiler API offers the restriction; if it is missing, the ring has no
collectives and a warning says why. A profiler started by the script takes over Kineto: recording
pauses and restarts after it has ended.
"""

import os
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.autograd import profiler as autograd_profiler

from ms_profile.clocks.clock_pair import read_clocks
from ms_profile.log.ring import Kind, Ring
from ms_profile.vendors import any_vendors

MIN_SESSION_STEPS: Final = 4
"""Shortest session, in steps: enough to see whether an open scope closes with each step."""
INVERSE_TIME_BUDGET: Final = 2500
"""Collecting may take at most 1/2500 of the time."""
MAX_STRETCH: Final = 5
"""Limit on stretching the interval, as a factor: a kill loses one interval of records."""
COLLECTIVE: Final = any_vendors("host_backend", "device_backend", end=":")


def kind_of_scope(name: str) -> Kind:
    """Map the name of a torch profiler scope to a kind of span."""
    if COLLECTIVE.match(name):
        return Kind.COLLECTIVE
    if name.startswith("enumerate(DataLoader)"):
        return Kind.DATA
    if name.startswith("Optimizer.step"):
        return Kind.OPTIMIZER
    return Kind.OTHER


class ScopeRecorder:
    """Record this process's scopes into a ring, interval by interval.

    Args:
        ring: destination of the spans.
        interval_s: minimum time between collections; increased up to fivefold if collecting takes
            more than 0.04% of the run time.
    """

    def __init__(self, ring: Ring, *, interval_s: float = 2.0) -> None:
        # Kineto reads this on first use; otherwise it prints a line per start.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._ring = ring
        self._interval_ns = int(interval_s * 1e9)
        self._settings: Any = autograd_profiler.profile()
        self._on = False
        self._thread = 0
        """Thread that started the Kineto session."""
        self._cost_ns = 0
        """CPU time of the last collection plus the start after it; 0 before the first."""
        self._since_ns = 0
        self._boundaries = 0
        self._steps: list[tuple[int, int]] = []
        self.open_scope: str | None = None
        """A script's scope that is open over several steps, so no session may follow."""
        self.data_wait_ns = 0
        """Time spent waiting for batches so far."""
        self.collectives = 0
        """Number of collectives so far."""

    def start(self) -> None:
        """Start recording, unless the script's own profiler is active.

        Raises:
            RuntimeError, TypeError, AttributeError: this torch cannot restrict Kineto to scopes.
        """
        if self._on or _script_profiles():
            return
        start_cpu_ns = time.thread_time_ns()
        native = torch._C._autograd
        scopes = {torch._C._profiler.RecordScope.USER_SCOPE}
        activities = self._settings.kineto_activities
        # As torch's profiler starts: `prepare` sets Kineto up, `enable` begins to record.
        native._prepare_profiler(self._settings.config(create_trace_id=True), activities)
        config = self._settings.config(create_trace_id=False)
        native._enable_profiler(config, activities, scopes)  # type: ignore[call-arg]
        self._on, self._since_ns, self._boundaries = True, time.monotonic_ns(), 0
        self._thread = threading.get_ident()
        if self._cost_ns:  # the first start also sets Kineto up, which costs more than later ones
            self._cost_ns += time.thread_time_ns() - start_cpu_ns

    def begin_step(self, step: int) -> None:
        """Record where a step begins, to assign spans collected later to the right step."""
        self._steps.append((time.monotonic_ns(), step))
        self._boundaries += 1

    @property
    def on(self) -> bool:
        """Whether a Kineto session is open."""
        return self._on

    def due(self) -> bool:
        """Return whether the session has lasted for the interval and `MIN_SESSION_STEPS` steps."""
        if not self._on or self._boundaries < MIN_SESSION_STEPS:
            return False
        interval_ns = max(
            self._interval_ns,
            min(INVERSE_TIME_BUDGET * self._cost_ns, MAX_STRETCH * self._interval_ns),
        )
        return time.monotonic_ns() - self._since_ns >= interval_ns

    def stop_in_own_thread(self) -> bool:
        """Stop if this thread started the open session; return whether it did."""
        is_ours = self._on and self._thread == threading.get_ident()
        if is_ours:
            self.stop()
        return is_ours

    def stop(self) -> None:
        """Move the records of the session into the ring and end it."""
        if not self._on:
            return
        self._on, self._cost_ns, start_cpu_ns = False, 0, time.thread_time_ns()
        native = torch._C._autograd
        # The script's profiler took over and ended this session; its records belong to the script.
        if _script_profiles() or not native._profiler_enabled():
            return
        # Kineto's times are wall-clock, the ring's are monotonic.
        clock = read_clocks()
        # The last start is kept, as the next session begins within the same step.
        steps, self._steps = self._steps or [(0, self._ring.step)], self._steps[-1:]
        events = native._disable_profiler().events()
        self.open_scope = _find_lasting_scope(events, self._boundaries)
        for event in events:
            name, length_ns = event.name(), event.duration_ns()
            span_kind = kind_of_scope(name)
            if span_kind is Kind.OPTIMIZER:
                continue  # recorded by the optimizer hooks
            start_ns = clock.monotonic_of(event.start_ns())
            # The last step that began before the span; 1 << 62 sorts after every step number.
            step_index = max(bisect_right(steps, (start_ns, 1 << 62)) - 1, 0)
            name_id = self._ring.name(name)
            self._ring.record(
                name_id, span_kind, start_ns, start_ns + length_ns, step=steps[step_index][1]
            )
            self.data_wait_ns += length_ns if span_kind is Kind.DATA else 0
            self.collectives += span_kind is Kind.COLLECTIVE
        # `start` adds its own time: the cost of a collection is the sum of both.
        self._cost_ns = time.thread_time_ns() - start_cpu_ns


def _find_lasting_scope(events: Iterable[Any], steps: int) -> str | None:
    """Return a scope that was open at the end of a session and is not closed in every step.

    A session that ended within its first step has too little data to find one.
    """
    closed: Counter[str] = Counter()
    still_open: list[str] = []
    for event in events:
        if event.end_thread_id():
            closed[event.name()] += 1
        elif kind_of_scope(event.name()) not in (Kind.COLLECTIVE, Kind.OPTIMIZER):
            still_open.append(event.name())
    lasting = (name for name in still_open if closed[name] < steps - 1)
    return next(lasting, None)


def _script_profiles() -> bool:
    return bool(getattr(autograd_profiler, "_is_profiler_enabled", False))
