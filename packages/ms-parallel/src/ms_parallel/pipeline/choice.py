"""Pipeline schedule of an engine: chosen by name, file or value; and forward-only schedules."""

from functools import cache
from pathlib import Path

from ms_parallel.errors import ConfigError, ScheduleError
from ms_parallel.files.untrusted import decoding, read_text
from ms_parallel.pipeline.layer_split import ScheduleChoice, StagedSchedule
from ms_parallel.schedules.checks.verify import verify
from ms_parallel.schedules.generators.registry import named_schedule
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.placements import stages_by_rank
from ms_parallel.schedules.table.schedule import Schedule

LIMIT_BYTES = 1 << 26
SEARCH = "search"
"""Choice of a schedule by search with measured costs, before a run starts."""


class ScheduleTables:
    """Tables for a choice of schedule; generated once per number of microbatches.

    Args:
        choice: generator name, CSV file in the format of torch.distributed.pipelining, or a table
            with or without a layer split. Files and tables fix the number of microbatches.
        ranks: pipeline ranks of the layout.

    Raises:
        ConfigError: the file cannot be read, or the table is for another number of ranks.
        ScheduleError: the name is unknown, or the table is invalid.
    """

    def __init__(self, choice: ScheduleChoice, ranks: int) -> None:
        self.layers: tuple[int, ...] | None = None
        """Layers of each stage, if the choice fixes them."""
        if isinstance(choice, StagedSchedule):
            self.layers, choice = choice.layers, choice.schedule
        if choice == SEARCH:
            raise ConfigError(
                "schedule='search' needs measured costs; call search_schedule first and pass its"
                " result to the engine"
            )
        if not isinstance(choice, Schedule) and is_file(choice):
            choice = read_schedule(choice)
        self.choice = choice
        self.ranks = ranks
        if not isinstance(choice, Schedule):
            # Any number of microbatches will do, as the placement does not depend on it.
            self.placement = _generated(
                str(choice), ranks, MIN_MICROBATCHES_PER_RANK * ranks
            ).placement
            """Pipeline rank of each stage."""
            return
        if choice.ranks != ranks:
            raise ConfigError(
                f"the schedule is for {choice.ranks} ranks but pipeline={ranks}; use a schedule for"
                f" {ranks} ranks"
            )
        verify(choice)
        self.placement = choice.placement

    def training(self, microbatches: int) -> Schedule:
        """Return the schedule of a training step.

        Raises:
            ConfigError: the chosen table is for another number of microbatches.
            ScheduleError: the chosen generator needs more microbatches.
        """
        if not isinstance(self.choice, Schedule):
            return _generated(str(self.choice), self.ranks, microbatches)
        if self.choice.microbatches != microbatches:
            raise ConfigError(
                f"the schedule is for {self.choice.microbatches} microbatches but the batch has"
                f" {microbatches}; change microbatch_size or the schedule"
            )
        return self.choice

    def forwards(self, microbatches: int) -> Schedule:
        """Return a forward-only schedule, for evaluation and generation."""
        return _forwards(self.placement, microbatches)


MIN_MICROBATCHES_PER_RANK = 2
"""Microbatches per rank that suffice for every generator; the placement does not depend on them."""


def read_schedule(path: str | Path) -> Schedule:
    """Read and verify a CSV file in the format of torch.distributed.pipelining.

    Raises:
        ConfigError: the file cannot be read.
        ScheduleError: the table is invalid; names the file.
    """
    context = f"schedule {path}"
    try:
        text = read_text(path, error=ConfigError, limit_bytes=LIMIT_BYTES)
    except ConfigError as error:
        raise ConfigError(f"schedule {error}") from error
    with decoding(context, error=ScheduleError):
        try:
            schedule = Schedule.from_csv(text, name=Path(path).stem)
            verify(schedule)
        except ScheduleError as error:
            raise ScheduleError(f"{context}: {error}") from error
    return schedule


def is_file(choice: str | Path) -> bool:
    """Return whether a choice of schedule is a CSV file."""
    return isinstance(choice, Path) or choice.lower().endswith(".csv")


@cache
def _generated(name: str, ranks: int, microbatches: int) -> Schedule:
    schedule = named_schedule(name, ranks, microbatches)
    verify(schedule)
    return schedule


@cache
def _forwards(placement: tuple[int, ...], microbatches: int) -> Schedule:
    rows = [
        [
            Action(Kind.FORWARD, stage, microbatch)
            for microbatch in range(microbatches)
            for stage in stages
        ]
        for stages in stages_by_rank(placement)
    ]
    return Schedule.from_computations(rows, placement, microbatches, "forwards")
