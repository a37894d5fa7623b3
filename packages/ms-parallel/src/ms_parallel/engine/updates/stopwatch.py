"""How long this process's rows of an update take, without waiting for other data ranks."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import monotonic

import torch

from ms_parallel.pipeline.recorder import Recorder
from ms_parallel.pipeline.runtime import Runtime
from ms_parallel.schedules.table.action import Kind


class NoStopwatch:
    """Takes no time; the default."""

    seconds = 0.0

    def of(self, rows: Sequence[int]) -> AbstractContextManager[None]:
        """Leave a step untimed."""
        return nullcontext()


class Stopwatch:
    """A context manager around an update's forwards and backwards; `seconds` says what they took.

    Where data ranks exchange nothing before the sum of gradients, that is the time from begin to
    end. Where they gather weights for the first microbatch and scatter gradients with the last one,
    these two would wait for the slowest: the computations between them are timed one by one, and
    stand for all.

    Args:
        runtime: performs the computations.
        device: on which.
        between: leave out the first forward and the last backward of each stage.
    """

    def __init__(self, runtime: Runtime, device: torch.device, *, between: bool = False) -> None:
        self.runtime, self.device, self.between = runtime, device, between
        self.seconds = 0.0
        """Seconds of the last update."""
        self.rows: Sequence[int] = ()
        """Rows of each of its microbatches."""
        self._began = 0.0
        self._own: Recorder | None = None

    def of(self, rows: Sequence[int]) -> "Stopwatch":
        """Time an update of microbatches of so many rows."""
        self.rows = rows
        return self

    def __enter__(self) -> None:
        """Start the clock of the computations, with a recorder if times between them need one."""
        if self.between and self.runtime.recorder is None:
            self._own = self.runtime.recorder = Recorder(self.device)
        self._began = monotonic()

    def __exit__(self, *raised: object) -> None:
        """Wait for the device and take the time, unless the block was ended by an exception."""
        recorder, own = self.runtime.recorder, self._own
        if own is not None:
            self.runtime.recorder = self._own = None
        if any(raised):
            return
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.seconds = monotonic() - self._began
        if self.between and recorder is not None and len(self.rows) > 1:
            self.seconds = self._between(recorder)

    def _between(self, recorder: Recorder) -> float:
        """Estimate the seconds of all rows by those of computations that wait for nobody."""
        assert recorder.schedule is not None
        row = recorder.schedule.computations()[self.runtime.groups.place.pipeline]
        last = {each.stage: at for at, each in enumerate(row) if each.kind is not Kind.FORWARD}
        ends, forwards, backwards = set(last.values()), 0, 0
        seen: set[int] = set()
        for at, (action, (begin, end)) in enumerate(zip(row, recorder.times_ns(), strict=True)):
            if action.kind is Kind.FORWARD:
                forwards += (end - begin) if action.stage in seen else 0
                seen.add(action.stage)
            elif at not in ends:
                backwards += end - begin
        every = sum(self.rows)
        first, final = every - self.rows[0], every - self.rows[-1]
        return (forwards * every / first + backwards * every / final) / 1e9
