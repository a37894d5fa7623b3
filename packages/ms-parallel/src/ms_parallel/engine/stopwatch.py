"""Time that this process spends on its rows of an update, without waits for other data ranks."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import monotonic

import torch

from ms_parallel.pipeline.recorder import ComputationRecorder
from ms_parallel.pipeline.runtime import Runtime
from ms_parallel.schedules.table.action import Kind


class NoStopwatch:
    """Default: measures no time."""

    seconds = 0.0

    def of(self, rows: Sequence[int]) -> AbstractContextManager[None]:
        """Leave a step untimed."""
        return nullcontext()


class Stopwatch:
    """Context manager that times an update's forwards and backwards; `seconds` is the result.

    If data ranks exchange nothing before gradients are summed, this is the time from start to end.
    If they gather weights for the first microbatch and scatter gradients with the last one, both
    would include waits for the slowest rank. The computations in between are then timed
    individually and extrapolated to all rows.

    Args:
        runtime: pipeline runtime that performs the computations.
        device: device that performs them.
        between: leave out the first forward and the last backward of each stage.
    """

    def __init__(self, runtime: Runtime, device: torch.device, *, between: bool = False) -> None:
        self.runtime, self.device, self.between = runtime, device, between
        self.seconds = 0.0
        """Seconds of the last update."""
        self.rows: Sequence[int] = ()
        """Number of rows of each of its microbatches."""
        self._began = 0.0
        self._own_recorder: ComputationRecorder | None = None

    def of(self, rows: Sequence[int]) -> "Stopwatch":
        """Time an update whose microbatches have these numbers of rows."""
        self.rows = rows
        return self

    def __enter__(self) -> None:
        """Start the clock, with a recorder if single computations have to be timed."""
        # A recorder installed by the caller is used unchanged.
        if self.between and self.runtime.recorder is None:
            self._own_recorder = self.runtime.recorder = ComputationRecorder(self.device)
        self._began = monotonic()

    def __exit__(self, *raised: object) -> None:
        """Wait for the device and record the time, unless the block raised an exception."""
        recorder, own_recorder = self.runtime.recorder, self._own_recorder
        if own_recorder is not None:
            self.runtime.recorder = self._own_recorder = None
        if any(raised):
            return
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.seconds = monotonic() - self._began
        if self.between and recorder is not None and len(self.rows) > 1:
            self.seconds = self._between(recorder)

    def _between(self, recorder: ComputationRecorder) -> float:
        """Estimate the seconds of all rows from computations that wait for no other rank."""
        assert recorder.schedule is not None
        row = recorder.schedule.computations()[self.runtime.groups.place.pipeline]
        # A stage's last backward waits for the gradient scatter, its first forward for the
        # weight gather; both are left out.
        last = {
            computation.stage: index
            for index, computation in enumerate(row)
            if computation.kind is not Kind.FORWARD
        }
        ends, forwards, backwards = set(last.values()), 0, 0
        seen: set[int] = set()
        for index, (action, (begin, end)) in enumerate(zip(row, recorder.times_ns(), strict=True)):
            if action.kind is Kind.FORWARD:
                forwards += (end - begin) if action.stage in seen else 0
                seen.add(action.stage)
            elif index not in ends:
                backwards += end - begin
        total_rows = sum(self.rows)
        first, final = total_rows - self.rows[0], total_rows - self.rows[-1]
        # Nanoseconds per row without these computations, times all rows.
        return (forwards * total_rows / first + backwards * total_rows / final) / 1e9
