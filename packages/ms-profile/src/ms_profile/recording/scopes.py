"""Record collectives with durations at little cost: Kineto, restricted to user scopes.

Every Work of a process group opens such a scope (`gloo:all_reduce`), and so do DataLoader,
optimizers, DDP and FSDP; operators don't. So a step has a handful of records instead of thousands,
and the backward pass of DDP, which no hook in Python sees, is seen. The records are collected into
the ring at a step's boundary, at most every other second; less often where a collection takes more
than its share of the time, so that a slow host pays no more for it than a fast one.

A scope that is open when one session of Kineto ends and another begins before it closes is fatal:
torch then writes its end into memory that was freed. So sessions keep a step's distance, in which
what encloses a boundary closes; and where the script keeps a scope open over many steps, recording
ends for good. The scope of a Work ends on a thread of the group's, which remembers its session: no
other one is needed for it. So sessions end right behind an update of the weights, when no message
is on its way; where a step begins, a stage of a pipeline may already have asked for its first.

torch offers the restriction only below its public profiler; where it is missing, the ring has no
collectives and a warning names the reason. A profiler that the script starts takes Kineto over:
then this stops, and starts again once that has ended.
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

FEWEST_STEPS: Final = 4
"""Steps of a session, from which it is seen whether an open scope closes with each step."""
SHARE: Final = 2500
"""A collection is to take at most one part in so many of the time."""
STRETCH: Final = 5
"""Times the interval that is waited at the most to keep to that: a kill loses as much."""
COLLECTIVE: Final = any_vendors("host_backend", "device_backend", end=":")


def kind_of_scope(name: str) -> Kind:
    """Return the kind of span that a scope of torch's is."""
    if COLLECTIVE.match(name):
        return Kind.COLLECTIVE
    if name.startswith("enumerate(DataLoader)"):
        return Kind.DATA
    if name.startswith("Optimizer.step"):
        return Kind.OPTIMIZER
    return Kind.OTHER


class ScopeRecorder:
    """Record the scopes of this process into a ring, interval by interval.

    Args:
        ring: where spans go.
        interval_s: between collections, at least; up to five times as long where they take more
            than 0.04% of the time.
    """

    def __init__(self, ring: Ring, *, interval_s: float = 2.0) -> None:
        # Kineto prints a line for each start otherwise; it reads this when first used.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._ring = ring
        self._interval_ns = int(interval_s * 1e9)
        self._settings: Any = autograd_profiler.profile()
        self._on = False
        self._thread = 0
        """The thread that Kineto's session is of."""
        self._cost_ns = 0
        """Processor time of the last collection and of the start after it; 0 before the first."""
        self._since_ns = 0
        self._boundaries = 0
        self._steps: list[tuple[int, int]] = []
        self.open_scope: str | None = None
        """A scope of the script's that stays open over steps: another session would be fatal."""
        self.data_wait_ns = 0
        """Waiting for batches seen so far."""
        self.collectives = 0
        """Collectives seen so far."""

    def start(self) -> None:
        """Begin to record, unless a profiler of the script's is at work.

        Raises:
            RuntimeError, TypeError, AttributeError: this torch cannot restrict Kineto to scopes.
        """
        if self._on or _script_profiles():
            return
        begun_ns = time.thread_time_ns()
        native = torch._C._autograd
        scopes = {torch._C._profiler.RecordScope.USER_SCOPE}
        activities = self._settings.kineto_activities
        native._prepare_profiler(self._settings.config(create_trace_id=True), activities)
        config = self._settings.config(create_trace_id=False)
        native._enable_profiler(config, activities, scopes)  # type: ignore[call-arg]
        self._on, self._since_ns, self._boundaries = True, time.monotonic_ns(), 0
        self._thread = threading.get_ident()
        if self._cost_ns:  # the very first start sets Kineto up: no later one costs as much
            self._cost_ns += time.thread_time_ns() - begun_ns

    def begin_step(self, step: int) -> None:
        """Note that a step begins now, so that what is collected later is put to the right one."""
        self._steps.append((time.monotonic_ns(), step))
        self._boundaries += 1

    @property
    def on(self) -> bool:
        """Whether a session is open."""
        return self._on

    def due(self) -> bool:
        """Return whether a session is open for longer than the interval, and for some steps."""
        if not self._on or self._boundaries < FEWEST_STEPS:
            return False
        interval_ns = max(
            self._interval_ns, min(SHARE * self._cost_ns, STRETCH * self._interval_ns)
        )
        return time.monotonic_ns() - self._since_ns >= interval_ns

    def stop_in_own_thread(self) -> bool:
        """Stop, if a session is open that this thread started; return whether one was."""
        own = self._on and self._thread == threading.get_ident()
        if own:
            self.stop()
        return own

    def stop(self) -> None:
        """Collect what was recorded into the ring, and end."""
        if not self._on:
            return
        self._on, self._cost_ns, begun_ns = False, 0, time.thread_time_ns()
        native = torch._C._autograd
        if _script_profiles() or not native._profiler_enabled():
            return
        clock = read_clocks()
        steps, self._steps = self._steps or [(0, self._ring.step)], self._steps[-1:]
        events = native._disable_profiler().events()
        self.open_scope = _lasting_scope(events, self._boundaries)
        for event in events:
            name, length_ns = event.name(), event.duration_ns()
            kind = kind_of_scope(name)
            if kind is Kind.OPTIMIZER:
                continue  # the hooks record it as it happens
            start_ns = clock.monotonic_of(event.start_ns())
            place = max(bisect_right(steps, (start_ns, 1 << 62)) - 1, 0)
            number = self._ring.name(name)
            self._ring.record(number, kind, start_ns, start_ns + length_ns, step=steps[place][1])
            self.data_wait_ns += length_ns if kind is Kind.DATA else 0
            self.collectives += kind is Kind.COLLECTIVE
        # The next start adds its own: together they are what one collection takes.
        self._cost_ns = time.thread_time_ns() - begun_ns


def _lasting_scope(events: Iterable[Any], steps: int) -> str | None:
    """Return a scope that was open at the end of a session and is not closed every step.

    A session that was cut off within its first step shows nothing.
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
