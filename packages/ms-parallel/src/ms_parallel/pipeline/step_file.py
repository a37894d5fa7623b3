"""File of a recorded step: its schedule and the times of its computations; does not need torch."""

from fractions import Fraction
from pathlib import Path

import msgspec

from ms_parallel.errors import ConfigError, ScheduleError
from ms_parallel.files.durable import write_file, writing
from ms_parallel.files.untrusted import decode_json, decoding, read_bytes
from ms_parallel.schedules.checks.verify import verify
from ms_parallel.schedules.table.costs import Costs
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.schedules.timeline.measured import measured, measured_costs
from ms_parallel.schedules.timeline.simulate import Timeline

LIMIT_BYTES = 1 << 28
NS_PER_MS = 1_000_000


class RecordedStep(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="timeline.v1"
):
    """A training step, as recorded by `pipeline.recorder`."""

    step: int
    """Number of steps taken before this one."""
    layout: str
    name: str
    """Name of the schedule."""
    table: str
    """The schedule in the CSV format of torch.distributed.pipelining."""
    times_ns: tuple[tuple[tuple[int, int], ...], ...]
    """(start, end) of each forward and backward per pipeline rank, in order, on one clock."""

    @property
    def schedule(self) -> Schedule:
        """The recorded schedule."""
        return Schedule.from_csv(self.table, name=self.name)

    def timeline(self) -> Timeline:
        """Timeline of the step, in milliseconds."""
        return measured(self.schedule, self._times_ms())

    def costs(self) -> Costs:
        """Mean times per stage, in milliseconds; see `measured_costs`."""
        return measured_costs(self.schedule, self._times_ms())

    def _times_ms(self) -> list[list[tuple[Fraction, Fraction]]]:
        # Exact: nanoseconds are not representable as float milliseconds.
        return [
            [(Fraction(begin, NS_PER_MS), Fraction(end, NS_PER_MS)) for begin, end in row]
            for row in _shift_to_zero(self.times_ns)
        ]


def write_step(path: Path, step: RecordedStep) -> None:
    """Write a file for `read_step`, atomically.

    Raises:
        CheckpointError: the file cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, msgspec.json.encode(step))


def is_recording(path: str | Path) -> bool:
    """Return whether a path names a recorded step rather than a schedule table."""
    return str(path).lower().endswith(".json")


def read_step(path: str | Path) -> RecordedStep:
    """Read and validate a recorded step.

    Raises:
        ConfigError: the file cannot be read or is not a recorded step; names the file.
    """
    content = read_bytes(path, error=ConfigError, limit_bytes=LIMIT_BYTES)
    context = f"{path}: not a recorded step"
    try:
        step = decode_json(content, RecordedStep, where=context, error=ConfigError)
        with decoding(context, error=ConfigError):
            verify(step.schedule)
            step.timeline()
    except ConfigError as error:
        raise ConfigError(f"{error}; record one with record_every") from error
    return step


def _shift_to_zero(
    times: tuple[tuple[tuple[int, int], ...], ...],
) -> tuple[tuple[tuple[int, int], ...], ...]:
    origin = min((begin for row in times for begin, _ in row), default=0)
    for rank, row in enumerate(times):
        available_from = 0
        for begin, end in row:
            # Computations of a rank must be in order and must not overlap.
            if not available_from <= begin - origin <= end - origin:
                raise ScheduleError(f"rank {rank} has overlapping or negative times")
            available_from = end - origin
    return tuple(tuple((begin - origin, end - origin) for begin, end in row) for row in times)
