"""Records when this rank's computations begin and end, on one clock for all ranks of a pipeline."""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ms_parallel.cluster.groups import Groups
from ms_parallel.pipeline.step_file import RecordedStep
from ms_parallel.schedules.table.schedule import Schedule

ECHOES = 16
"""Round trips to the first rank's clock; the fastest counts."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
T = TypeVar("T")


class Recorder:
    """A context manager that records when each computation begins and ends.

    On a CPU it reads the clock, which costs less than a microsecond. On an accelerator it records
    events in the stream, so that nothing waits while the schedule runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cpu = device.type == "cpu"
        self.schedule: Schedule | None = None
        """The schedule that was run."""
        self.marks_ns: list[int] = []
        self.events: list[torch.Event] = []
        self.origin_ns = time.monotonic_ns()
        if not self.on_cpu:
            torch.accelerator.synchronize()
            self._event()
            torch.accelerator.synchronize()
            self.origin_ns = time.monotonic_ns()

    def __enter__(self) -> None:
        """Record the start of a computation."""
        self._mark()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the recording."""
        self._mark()

    def _mark(self) -> None:
        if self.on_cpu:
            self.marks_ns.append(time.monotonic_ns())
        else:
            self._event()

    def _event(self) -> None:
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        self.events.append(event)

    def times_ns(self) -> list[tuple[int, int]]:
        """List each computation's (start, end) in nanoseconds of this machine's monotonic clock."""
        marks = self.marks_ns
        if not self.on_cpu:
            torch.accelerator.synchronize()
            first, *events = self.events
            marks = [self.origin_ns + round(1e6 * first.elapsed_time(each)) for each in events]
        return list(zip(marks[::2], marks[1::2], strict=True))


def recorded_step(recorder: Recorder, groups: Groups, step: int) -> RecordedStep | None:
    """Gather the recordings of all ranks of this pipeline; every process calls it.

    Args:
        recorder: recorder of `Engine.record_step`.
        groups: process groups of the layout.
        step: steps taken before this one.

    Returns:
        The step; None if nothing had a loss.
    """
    if recorder.schedule is None:
        return None
    return RecordedStep(
        step=step,
        layout=str(groups.layout),
        name=recorder.schedule.name,
        table=recorder.schedule.to_csv(),
        times_ns=tuple(map(tuple, gather_times(recorder, groups))),
    )


def gather_times(recorder: Recorder, groups: Groups) -> list[list[tuple[int, int]]]:
    """Gather all pipeline ranks' times, in nanoseconds of the first one's clock; all call it."""
    own = recorder.times_ns()
    if groups.layout.pipeline == 1:
        return [own]
    shift = 0 if _one_machine(groups) else offset_ns(groups)
    return _all([(begin + shift, end + shift) for begin, end in own], groups)


def offset_ns(groups: Groups, clock: Callable[[], int] = time.monotonic_ns) -> int:
    """Measure the offset of the first pipeline rank's clock from this rank's, in nanoseconds.

    Half of the fastest of some round trips bounds the error (Cristian, 1989).

    Args:
        groups: the layout's processes; every pipeline rank calls this.
        clock: of this rank, in nanoseconds.
    """
    group, here = groups.group("pipeline"), groups.place.pipeline
    first, box = groups.peer("pipeline", 0), torch.zeros(1, dtype=torch.int64, device=groups.wire)
    best: tuple[int, int] | None = None
    for other in range(1, groups.layout.pipeline):
        for _ in range(ECHOES):
            if here == other:
                asked = clock()
                dist.send(box, first, group=group)
                dist.recv(box, first, group=group)
                answered, theirs = clock(), int(box)
                trip = answered - asked
                best = min(best or (trip, 0), (trip, theirs - (asked + answered) // 2))
            elif here == 0:
                peer = groups.peer("pipeline", other)
                dist.recv(box, peer, group=group)
                box.fill_(clock())
                dist.send(box, peer, group=group)
    return best[1] if best else 0


def _one_machine(groups: Groups) -> bool:
    """Return whether all pipeline ranks read one clock: they were booted together."""
    boots = set(_all(BOOT.read_text() if BOOT.exists() else "", groups))
    return len(boots) == 1 and "" not in boots


def _all(own: T, groups: Groups) -> list[T]:
    """Gather each pipeline rank's value."""
    each: list[Any] = [None] * groups.layout.pipeline
    dist.all_gather_object(each, own, group=groups.group("pipeline"))
    return each
