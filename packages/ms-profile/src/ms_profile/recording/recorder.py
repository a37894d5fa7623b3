"""`Recorder`: a process's spans in a ring that outlives it, cheap enough to be always on.

Steps, modules, optimizers and garbage collection are recorded as they happen; collectives and
DataLoader's waits, which only Kineto sees, are collected every 2 to 10 seconds. See `log.ring` for
what a kill leaves, `step_watch` for how steps are found, `scopes` for the collectives.
"""

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from ms_profile.errors import number_in_environment
from ms_profile.log.ring import Kind, Ring

if TYPE_CHECKING:
    from torch import nn

    from ms_profile.recording.scopes import ScopeRecorder
    from ms_profile.recording.step_watch import StepWatch

Item = TypeVar("Item")
GARBAGE_NS: Final = 50_000
"""Shorter collections are left out of the ring: the young ones come by the hundred."""


ACTIVE: Final[list["Recorder"]] = []
"""The recorders of this process that are open."""


def mark_step(*models: "nn.Module") -> None:
    """Note in this process's recorders that the weights were just updated.

    Only a training that steps without one of torch's optimizers has to call it; where nothing
    records, it does nothing.

    Args:
        models: the modules that were trained, to be watched from their next call on.
    """
    for recorder in ACTIVE:
        recorder.mark(models)


def _abandon_in_child() -> None:
    for recorder in tuple(ACTIVE):
        recorder.abandon()


def _make_ready_to_fork() -> None:
    for recorder in ACTIVE:
        recorder.make_ready_to_fork()


os.register_at_fork(before=_make_ready_to_fork, after_in_child=_abandon_in_child)


class Recorder:
    """Record this process into a ring from now until `close`; `attach` adds what torch does.

    A process that this one forks is not recorded: it runs as if there were no recorder.

    Args:
        path: the ring's file.
        rank: whose it is; the environment's `RANK`, or 0.
        capacity: spans kept, of 32 bytes each.
        on_step: called with the number of each step that begins, once torch is attached.
        on_update: called behind each update of the weights, where a session of Kineto may end.
        collect_interval_s: how often collectives are collected, or up to five times as long where
            that would take more than 0.04% of the time; each time, one step's are missed.

    Raises:
        RecordError: the file cannot be made at its full size.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int | None = None,
        capacity: int = 1 << 16,
        on_step: Callable[[int], None] = lambda step: None,
        on_update: Callable[[], None] = lambda: None,
        collect_interval_s: float = 2.0,
    ) -> None:
        place = number_in_environment("RANK", 0) if rank is None else rank
        self.ring = Ring(path, capacity=capacity, rank=place)
        self.problem: str | None = None
        """Why collectives are not recorded, if they are not."""
        self.kineto_free = True
        """Whether Kineto is ours to use in the step that begins; `on_step` may decide."""
        self._on_step, self._on_update = on_step, on_update
        self._collect_interval_s = collect_interval_s
        self._watch: StepWatch | None = None
        self._scopes: ScopeRecorder | None = None
        self._collecting_ns = 0
        self._closed = False
        self._resting = False
        gc.callbacks.append(self._on_garbage)
        ACTIVE.append(self)

    def attach(self) -> None:
        """Record what torch does from now on: import torch and add its hooks."""
        from ms_profile.recording.scopes import ScopeRecorder
        from ms_profile.recording.step_watch import StepWatch

        self._scopes = ScopeRecorder(self.ring, interval_s=self._collect_interval_s)
        self._watch = StepWatch(self.ring, self._begin_step, self._end_update)

    def mark(self, models: "Iterable[nn.Module]") -> None:
        """See `mark_step`."""
        if self._watch is not None:
            self._watch.mark(models)

    def close(self) -> None:
        """Collect what is left, remove every hook and close the ring; a second call is harmless."""
        if self._closed:
            return
        self._closed = True
        ACTIVE.remove(self)
        gc.callbacks.remove(self._on_garbage)
        self.release_kineto()
        if self._watch is not None:
            self._watch.close()
        self.ring.close()

    def release_kineto(self) -> None:
        """Collect what Kineto has seen; the next step is not recorded by it, nor is this one."""
        if self._scopes is not None and self._scopes.on:
            self._scopes.stop()
            self._resting = True

    def make_ready_to_fork(self) -> None:
        """End Kineto's session, so that the child has a profiler of its own to start."""
        if self._scopes is not None and self._scopes.stop_in_own_thread():
            self._resting = True

    def abandon(self) -> None:
        """Take every hook off, in a forked child, and leave the ring to the parent."""
        self._closed = True
        ACTIVE.remove(self)
        gc.callbacks.remove(self._on_garbage)
        self._scopes = None
        self.ring.abandon()
        if self._watch is not None:
            self._watch.unhook()

    @property
    def steps(self) -> int:
        """Steps that are over."""
        return self._watch.steps if self._watch is not None else 0

    @property
    def data_wait_s(self) -> float:
        """Seconds of waiting in DataLoader collected so far."""
        return self._scopes.data_wait_ns / 1e9 if self._scopes is not None else 0.0

    @contextmanager
    def span(self, name: str, kind: Kind = Kind.OTHER) -> Iterator[None]:
        """Record the time inside a `with`."""
        number = self.ring.begin(self.ring.name(name), kind)
        try:
            yield
        finally:
            self.ring.end(number)

    def batches(self, source: Iterable[Item], name: str = "next batch") -> Iterator[Item]:
        """Pass a source's items on, the wait for each recorded as a wait for data."""
        number = self.ring.name(name)
        iterator = iter(source)
        while True:
            span = self.ring.begin(number, Kind.DATA)
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.ring.end(span)
            yield item

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_step(self, step: int) -> None:
        if self._scopes is not None:
            self._scopes.begin_step(step)
            self._on_step(step)
            if self.kineto_free and not self._resting:
                self._start_scopes(self._scopes)
            self._resting = False
        else:
            self._on_step(step)

    def _end_update(self) -> None:
        if self._scopes is not None and self._scopes.due():
            self.release_kineto()
        self._on_update()

    def _start_scopes(self, scopes: "ScopeRecorder") -> None:
        if scopes.open_scope is not None:
            self.problem = (
                f"the script keeps the scope {scopes.open_scope!r} open over steps; "
                "outside the windows, collectives are recorded no more"
            )
            self._scopes = None
            return
        try:
            scopes.start()
        except (RuntimeError, TypeError, AttributeError) as error:
            self._scopes = None
            self.problem = f"this torch shows no collectives outside the windows: {error}"

    def _on_garbage(self, phase: str, info: dict[str, int]) -> None:
        now = time.monotonic_ns()
        if phase == "start":
            self._collecting_ns = now
        elif now - self._collecting_ns >= GARBAGE_NS:
            name = self.ring.name(f"gc generation {info['generation']}")
            self.ring.record(name, Kind.GARBAGE, self._collecting_ns, now)
