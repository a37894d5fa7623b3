"""The schedule that a search found for a run, as a file in the run's folder.

A resumed run performs the schedule that it began with, whatever would be measured now: its sums
keep their order, so its weights keep their bits.
"""

import os
from pathlib import Path

import msgspec

from ms_parallel.errors import ConfigError
from ms_parallel.files.durable import write_file, writing
from ms_parallel.files.untrusted import decode_json, decoding, read_bytes
from ms_parallel.pipeline.layer_split import Staged
from ms_parallel.schedules.checks.verify import verify
from ms_parallel.schedules.table.schedule import Schedule

FILE = "schedule.json"
"""Its name in `output_dir`."""
LIMIT_BYTES = 1 << 28


class FoundSchedule(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="schedule.v1"
):
    """A table, how many layers each stage has, and what both were found for."""

    conditions: dict[str, int | str | None]
    """What the costs and the table depend on; where any of it differs, the search is made again."""
    table: str
    """In torch.distributed.pipelining's CSV form."""
    layers: tuple[int, ...]
    """Layers of each stage."""
    makespan_ms: float
    """Time of one step, simulated with the measured costs."""
    lower_bound_ms: float
    """A time that no schedule with this split and placement can beat."""
    one_f_one_b_ms: float
    """What 1F1B would take with layers shared out evenly."""
    peak_bytes: tuple[int, ...]
    """Activations that each pipeline rank holds at most."""
    memory_cap_bytes: int | tuple[int, ...]
    """Most of any rank, or of each."""
    costs: dict[str, tuple[float, ...]]
    """Measured for each segment: milliseconds of each pass, bytes held."""

    @property
    def staged(self) -> Staged:
        """The table and its layers, as an engine takes them."""
        return Staged(schedule=Schedule.from_csv(self.table, name="search"), layers=self.layers)


def write_found(path: Path, found: FoundSchedule) -> None:
    """Write a file that `read_found` reads, whole or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, msgspec.json.format(msgspec.json.encode(found), indent=1))


def read_found(path: Path) -> FoundSchedule | None:
    """Read and prove a found schedule; None if there is no file.

    Raises:
        ConfigError: it cannot be read, or is not one.
    """
    remedy = "restore it, or delete it to search again"
    if not os.path.lexists(path):
        return None
    content = read_bytes(path, error=ConfigError, limit_bytes=LIMIT_BYTES)
    where = f"{path}: not a found schedule"
    try:
        found = decode_json(content, FoundSchedule, where=where, error=ConfigError)
        with decoding(where, error=ConfigError):
            verify(found.staged.schedule)
    except ConfigError as error:
        raise ConfigError(f"{error}; {remedy}") from error
    return found
