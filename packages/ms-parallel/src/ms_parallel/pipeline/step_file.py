"""One step of a real run as a file: its schedule, and when each computation ran; without torch."""

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
    """One update, as `pipeline.recorder` gathers it."""

    step: int
    """Updates made before this one."""
    layout: str
    name: str
    """Name of the schedule."""
    table: str
    """The schedule in torch.distributed.pipelining's CSV form."""
    times_ns: tuple[tuple[tuple[int, int], ...], ...]
    """For each pipeline rank (start, end) of each forward and backward in order, on one clock."""

    @property
    def schedule(self) -> Schedule:
        """The schedule that was run."""
        return Schedule.from_csv(self.table, name=self.name)

    def timeline(self) -> Timeline:
        """Return the timeline of the step, in milliseconds."""
        return measured(self.schedule, self._times_ms())

    def costs(self) -> Costs:
        """Compute mean times of each stage, in milliseconds; see `measured_costs`."""
        return measured_costs(self.schedule, self._times_ms())

    def _times_ms(self) -> list[list[tuple[Fraction, Fraction]]]:
        return [
            [(Fraction(begin, NS_PER_MS), Fraction(end, NS_PER_MS)) for begin, end in row]
            for row in _from_zero(self.times_ns)
        ]


def write_step(path: Path, step: RecordedStep) -> None:
    """Write a file that `read_step` reads, whole or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, msgspec.json.encode(step))


def is_recording(path: str | Path) -> bool:
    """Return whether a path names a recorded step rather than a table."""
    return str(path).lower().endswith(".json")


def read_step(path: str | Path) -> RecordedStep:
    """Read and check a recorded step.

    Raises:
        ConfigError: it cannot be read, or is not one; the file is named.
    """
    content = read_bytes(path, error=ConfigError, limit_bytes=LIMIT_BYTES)
    where = f"{path}: not a recorded step"
    try:
        step = decode_json(content, RecordedStep, where=where, error=ConfigError)
        with decoding(where, error=ConfigError):
            verify(step.schedule)
            step.timeline()
    except ConfigError as error:
        raise ConfigError(f"{error}; record one with record_every") from error
    return step


def _from_zero(
    times: tuple[tuple[tuple[int, int], ...], ...],
) -> tuple[tuple[tuple[int, int], ...], ...]:
    first = min((begin for row in times for begin, _ in row), default=0)
    for rank, row in enumerate(times):
        free = 0
        for begin, end in row:
            if not free <= begin - first <= end - first:
                raise ScheduleError(f"rank {rank} computes two things at once, or backwards")
            free = end - first
    return tuple(tuple((begin - first, end - first) for begin, end in row) for row in times)
