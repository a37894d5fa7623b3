"""File of the schedule that a search found for a run, in the run's output folder.

A resumed run uses the stored schedule instead of measuring again. The order of its sums does not
change, so its results stay bitwise the same.
"""

import os
from pathlib import Path

import msgspec

from ms_parallel.errors import ConfigError
from ms_parallel.files.durable import write_file, writing
from ms_parallel.files.untrusted import decode_json, decoding, read_bytes
from ms_parallel.pipeline.layer_split import StagedSchedule
from ms_parallel.schedules.checks.verify import verify
from ms_parallel.schedules.table.schedule import Schedule

FILE = "schedule.json"
"""File name in `output_dir`."""
LIMIT_BYTES = 1 << 28


class SearchedSchedule(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="schedule.v1"
):
    """Searched schedule, its layer split, and the conditions of the search."""

    conditions: dict[str, int | str | None]
    """Everything that the costs and the schedule depend on; if it differs, the search is redone."""
    table: str
    """Schedule in the CSV format of torch.distributed.pipelining."""
    layers: tuple[int, ...]
    """Layers of each stage."""
    makespan_ms: float
    """Step time, simulated with the measured costs."""
    lower_bound_ms: float
    """Lower bound on the step time with this split and placement."""
    one_f_one_b_ms: float
    """Simulated step time of 1F1B with evenly divided layers."""
    peak_bytes: tuple[int, ...]
    """Peak activation bytes of each pipeline rank."""
    memory_cap_bytes: int | tuple[int, ...]
    """Activation limit of every rank, or one per rank."""
    costs: dict[str, tuple[float, ...]]
    """Measured costs of each segment: milliseconds of each pass, bytes of activations."""

    @property
    def staged(self) -> StagedSchedule:
        """Schedule and layer split, in the form that an engine accepts."""
        return StagedSchedule(
            schedule=Schedule.from_csv(self.table, name="search"), layers=self.layers
        )


def write_searched_schedule(path: Path, record: SearchedSchedule) -> None:
    """Write a file for `read_searched_schedule`, atomically.

    Raises:
        CheckpointError: it cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, msgspec.json.format(msgspec.json.encode(record), indent=1))


def read_searched_schedule(path: Path) -> SearchedSchedule | None:
    """Read and verify a searched schedule; None without a file.

    Raises:
        ConfigError: the file cannot be read or is invalid.
    """
    remedy = "restore it, or delete it to search again"
    if not os.path.lexists(path):
        return None
    content = read_bytes(path, error=ConfigError, limit_bytes=LIMIT_BYTES)
    context = f"{path}: not a searched schedule"
    try:
        record = decode_json(content, SearchedSchedule, where=context, error=ConfigError)
        # A well-formed table can still deadlock.
        with decoding(context, error=ConfigError):
            verify(record.staged.schedule)
    except ConfigError as error:
        raise ConfigError(f"{error}; {remedy}") from error
    return record
