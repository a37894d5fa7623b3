"""Records start and end of this rank's computations, on one clock for all pipeline ranks."""

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

ROUND_TRIPS = 16
"""Round trips to the first rank for the clock offset; the fastest counts."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
T = TypeVar("T")


class ComputationRecorder:
    """Context manager that records the start and end of each computation.

    On a CPU it reads the clock, in less than a microsecond. On an accelerator it records events in
    the stream, without synchronization.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cpu = device.type == "cpu"
        self.schedule: Schedule | None = None
        """The recorded schedule."""
        self.marks_ns: list[int] = []
        self.events: list[torch.Event] = []
        self.origin_ns = time.monotonic_ns()
        if not self.on_cpu:
            # With an idle device, the event and the host's clock mark the same time.
            torch.accelerator.synchronize()
            self._event()
            torch.accelerator.synchronize()
            self.origin_ns = time.monotonic_ns()

    def __enter__(self) -> None:
        """Record the start of a computation."""
        self._mark()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Record the end of a computation."""
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
        """(start, end) of each computation, in nanoseconds of this machine's monotonic clock."""
        marks = self.marks_ns
        if not self.on_cpu:
            torch.accelerator.synchronize()
            first, *events = self.events
            # Events give milliseconds since the first; `origin_ns` anchors it to the host clock.
            marks = [self.origin_ns + round(1e6 * first.elapsed_time(event)) for event in events]
        return list(zip(marks[::2], marks[1::2], strict=True))


def recorded_step(recorder: ComputationRecorder, groups: Groups, step: int) -> RecordedStep | None:
    """Gather the recordings of all ranks of this pipeline. Collective.

    Args:
        recorder: recorder of `Engine.record_step`.
        groups: process groups of the layout.
        step: steps taken before this one.

    Returns:
        The step; None if no token had a target.
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


def gather_times(recorder: ComputationRecorder, groups: Groups) -> list[list[tuple[int, int]]]:
    """Gather all pipeline ranks' times, in nanoseconds of the first rank's clock. Collective."""
    local = recorder.times_ns()
    if groups.layout.pipeline == 1:
        return [local]
    # Processes on one host share the monotonic clock.
    shift = 0 if _share_clock(groups) else offset_ns(groups)
    return _gather([(begin + shift, end + shift) for begin, end in local], groups)


def offset_ns(groups: Groups, clock: Callable[[], int] = time.monotonic_ns) -> int:
    """Measure the offset of the first pipeline rank's clock from this rank's, in nanoseconds.

    Takes the fastest of several round trips; half of its duration bounds the error (Cristian 1989).

    Args:
        groups: process groups; every pipeline rank calls this.
        clock: this rank's clock, in nanoseconds.
    """
    group, local_rank = groups.group("pipeline"), groups.place.pipeline
    first, buffer = (
        groups.peer("pipeline", 0),
        torch.zeros(1, dtype=torch.int64, device=groups.message_device),
    )
    best: tuple[int, int] | None = None
    # One rank at a time, so that rank 0 answers without delay.
    for other_rank in range(1, groups.layout.pipeline):
        for _ in range(ROUND_TRIPS):
            if local_rank == other_rank:
                sent = clock()
                dist.send(buffer, first, group=group)
                dist.recv(buffer, first, group=group)
                received, remote = clock(), int(buffer)
                round_trip = received - sent
                # The remote clock was read about halfway through the round trip.
                best = min(best or (round_trip, 0), (round_trip, remote - (sent + received) // 2))
            elif local_rank == 0:
                peer = groups.peer("pipeline", other_rank)
                dist.recv(buffer, peer, group=group)
                buffer.fill_(clock())
                dist.send(buffer, peer, group=group)
    return best[1] if best else 0


def _share_clock(groups: Groups) -> bool:
    """Return whether all pipeline ranks have the same boot id, and so the same clock."""
    boots = set(_gather(BOOT.read_text() if BOOT.exists() else "", groups))
    return len(boots) == 1 and "" not in boots


def _gather(value: T, groups: Groups) -> list[T]:
    """Gather the values of all pipeline ranks."""
    values: list[Any] = [None] * groups.layout.pipeline
    dist.all_gather_object(values, value, group=groups.group("pipeline"))
    return values
