"""Collectives with durations at next to no cost: Kineto restricted to the scopes that users name.

Every Work of a process group opens such a scope (`gloo:all_reduce`), and so do DataLoader,
optimizers, DDP and FSDP; operators don't. So a step has a handful of records instead of thousands,
and the backward pass of DDP, which no hook in Python sees, is seen. The records are collected into
the ring at a step's boundary, at most every other second.

torch offers the restriction only below its public profiler; where it is missing, the ring has no
collectives and the run says so. A profiler that the script starts takes Kineto over: then this
stops, and starts again once that has ended.
"""

import os
import re
import time
from bisect import bisect_right
from typing import Any, Final

import torch
from torch.autograd import profiler as autograd_profiler

from ms_profile.clock import read_clocks
from ms_profile.ring import Kind, Ring

__all__ = ["ScopeRecorder", "kind_of_scope"]

COLLECTIVE: Final = re.compile(r"(gloo|nccl|hccl|mpi|ucc|xccl|fake):")


def kind_of_scope(name: str) -> Kind:
    """What a scope that torch opens stands for."""
    if COLLECTIVE.match(name):
        return Kind.COLLECTIVE
    if name.startswith("enumerate(DataLoader)"):
        return Kind.DATA
    if name.startswith("Optimizer.step"):
        return Kind.OPTIMIZER
    return Kind.OTHER


class ScopeRecorder:
    """Record the scopes of this process into a ring, interval by interval."""

    def __init__(self, ring: Ring, *, interval_s: float = 2.0) -> None:
        # Kineto prints a line for each start otherwise; it reads this when first used.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._ring = ring
        self._interval_ns = int(interval_s * 1e9)
        self._settings: Any = autograd_profiler.profile()
        self._on = False
        self._since_ns = 0
        self._steps: list[tuple[int, int]] = []
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
        native = torch._C._autograd
        scopes = {torch._C._profiler.RecordScope.USER_SCOPE}
        activities = self._settings.kineto_activities
        native._prepare_profiler(self._settings.config(create_trace_id=True), activities)
        config = self._settings.config(create_trace_id=False)
        native._enable_profiler(config, activities, scopes)  # type: ignore[call-arg]
        self._on, self._since_ns = True, time.monotonic_ns()

    def begin_step(self, step: int) -> None:
        """Note that a step begins now, so that what is collected later is put to the right one."""
        self._steps.append((time.monotonic_ns(), step))

    def due(self) -> bool:
        """Whether the interval has passed."""
        return time.monotonic_ns() - self._since_ns >= self._interval_ns

    def stop(self) -> None:
        """Collect what was recorded into the ring, and end."""
        if not self._on:
            return
        self._on = False
        native = torch._C._autograd
        if _script_profiles() or not native._profiler_enabled():
            return
        clock = read_clocks()
        steps, self._steps = self._steps or [(0, self._ring.step)], self._steps[-1:]
        for event in native._disable_profiler().events():
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


def _script_profiles() -> bool:
    return bool(getattr(autograd_profiler, "_is_profiler_enabled", False))
