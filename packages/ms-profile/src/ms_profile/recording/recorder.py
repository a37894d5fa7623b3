"""`Recorder`: a process's spans in a memory-mapped ring file, cheap enough to leave on.

Steps, modules, optimizers and garbage collection are recorded as they happen. Collectives and
DataLoader waits, which only Kineto sees, are collected every 2 to 10 seconds. See `log.ring` for
the data that survives a kill, `step_watch` for step detection and `scopes` for collectives.
"""

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from ms_profile.arguments import check_integer, check_number, check_type
from ms_profile.errors import RecordError, number_in_environment
from ms_profile.log.ring import Kind, Ring

if TYPE_CHECKING:
    from torch import nn

    from ms_profile.recording.scopes import ScopeRecorder
    from ms_profile.recording.step_watch import StepWatch

Item = TypeVar("Item")
MIN_GARBAGE_NS: Final = 50_000
"""Shorter garbage collections are not recorded: hundreds of them collect only young objects."""


ACTIVE: Final[list["Recorder"]] = []
"""The open recorders of this process."""


def mark_step(*models: "nn.Module") -> None:
    """Tell this process's recorders that the weights were just updated.

    Only needed by training code that does not use a torch optimizer. Does nothing if no recorder
    is open.

    Args:
        models: trained modules, whose calls are recorded from now on.
    """
    for recorder in ACTIVE:
        recorder.mark(models)


def _abandon_in_child() -> None:
    for recorder in tuple(ACTIVE):
        recorder.abandon()


def _prepare_fork() -> None:
    for recorder in ACTIVE:
        recorder.prepare_fork()


# A forked child shares the ring's pages with its parent, so it must stop before it records.
os.register_at_fork(before=_prepare_fork, after_in_child=_abandon_in_child)


class Recorder:
    """Record this process into a ring until `close`; `attach` adds the events of torch.

    Child processes forked from this one are not recorded.

    Args:
        path: ring file to create.
        rank: rank of this process; default: the environment's `RANK`, or 0.
        capacity: number of spans that the ring holds, 32 bytes each.
        on_step: called with the step number when a step begins, once torch is attached.
        on_update: called after each weight update, the point where a Kineto session may end.
        collect_interval_s: seconds between collections of collectives, or up to 5 times as long if
            collecting would take more than 0.04% of the time; each collection misses one step.

    Raises:
        RecordError: the file cannot be created at its full size.
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
        check_integer("rank", rank, minimum=0, maximum=2**31 - 1, error=RecordError, optional=True)
        check_integer("capacity", capacity, minimum=1, error=RecordError)
        check_number("collect_interval_s", collect_interval_s, minimum=0, error=RecordError)
        own_rank = number_in_environment("RANK", 0) if rank is None else rank
        self.ring = Ring(path, capacity=capacity, rank=own_rank)
        self.problem: str | None = None
        """Reason why collectives are not recorded, or None."""
        self.kineto_free = True
        """Whether the recorder may use Kineto in the next step; set by the session in `on_step`."""
        self._on_step, self._on_update = on_step, on_update
        self._collect_interval_s = collect_interval_s
        self._watch: StepWatch | None = None
        self._scopes: ScopeRecorder | None = None
        self._gc_start_ns = 0
        self._closed = False
        # True in the step after a Kineto session, as two sessions must be a step apart.
        self._resting = False
        gc.callbacks.append(self._on_garbage)
        ACTIVE.append(self)

    def attach(self) -> None:
        """Import torch and install the hooks that record it."""
        from ms_profile.recording.scopes import ScopeRecorder
        from ms_profile.recording.step_watch import StepWatch

        self._scopes = ScopeRecorder(self.ring, interval_s=self._collect_interval_s)
        self._watch = StepWatch(self.ring, self._begin_step, self._end_update)

    def mark(self, models: "Iterable[nn.Module]") -> None:
        """See `mark_step`."""
        if self._watch is not None:
            self._watch.mark(models)

    def close(self) -> None:
        """Collect pending records, remove every hook and close the ring; may be called twice."""
        if self._closed:
            return
        self._closed = True
        ACTIVE.remove(self)
        gc.callbacks.remove(self._on_garbage)
        # Before the ring is closed, as this writes the last scopes into it.
        self.release_kineto()
        if self._watch is not None:
            self._watch.close()
        self.ring.close()

    def release_kineto(self) -> None:
        """Collect Kineto's records and stop it for the rest of this step and the next one."""
        if self._scopes is not None and self._scopes.on:
            self._scopes.stop()
            self._resting = True

    def prepare_fork(self) -> None:
        """End the Kineto session, so that a forked child can start its own profiler."""
        if self._scopes is not None and self._scopes.stop_in_own_thread():
            self._resting = True

    def abandon(self) -> None:
        """Remove every hook in a forked child and leave the ring to the parent."""
        self._closed = True
        ACTIVE.remove(self)
        gc.callbacks.remove(self._on_garbage)
        self._scopes = None
        self.ring.abandon()
        if self._watch is not None:
            self._watch.unhook()

    @property
    def steps(self) -> int:
        """Number of finished steps."""
        return self._watch.steps if self._watch is not None else 0

    @property
    def data_wait_s(self) -> float:
        """Seconds of DataLoader waiting collected so far."""
        return self._scopes.data_wait_ns / 1e9 if self._scopes is not None else 0.0

    @contextmanager
    def span(self, name: str, kind: Kind = Kind.OTHER) -> Iterator[None]:
        """Record the duration of a `with` block.

        Raises:
            RecordError: name is not a string, or kind is not a `Kind`.
        """
        check_type("name", name, str, "a string", error=RecordError)
        check_type("kind", kind, Kind, "a Kind", error=RecordError)
        number = self.ring.begin(self.ring.name(name), kind)
        try:
            yield
        finally:
            self.ring.end(number)

    def batches(self, source: Iterable[Item], name: str = "next batch") -> Iterator[Item]:
        """Yield the items of `source` and record the wait for each as a data wait.

        Raises:
            RecordError: source is not iterable, or name is not a string.
        """
        check_type("source", source, Iterable, "an iterable of batches", error=RecordError)
        check_type("name", name, str, "a string", error=RecordError)
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
            # `_on_step` may reserve Kineto for a traced window, so scopes are started after it.
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
                f"the script keeps the scope {scopes.open_scope!r} open over several steps; "
                "collectives are no longer recorded outside the traced windows"
            )
            self._scopes = None
            return
        try:
            scopes.start()
        except (RuntimeError, TypeError, AttributeError) as error:
            self._scopes = None
            self.problem = (
                f"this torch version exposes no collectives outside the traced windows: {error}"
            )

    def _on_garbage(self, phase: str, info: dict[str, int]) -> None:
        now_ns = time.monotonic_ns()
        if phase == "start":
            self._gc_start_ns = now_ns
        elif now_ns - self._gc_start_ns >= MIN_GARBAGE_NS:
            name = self.ring.name(f"gc generation {info['generation']}")
            self.ring.record(name, Kind.GARBAGE, self._gc_start_ns, now_ns)
