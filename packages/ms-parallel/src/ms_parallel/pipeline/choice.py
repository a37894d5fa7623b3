"""The schedule that an engine performs: chosen by name, file or value; and forwards alone."""

from functools import cache
from pathlib import Path

from ms_parallel.errors import ConfigError, ScheduleError
from ms_parallel.files.untrusted import decoding, read_text
from ms_parallel.pipeline.layer_split import Choice, Staged
from ms_parallel.schedules.checks.verify import verify
from ms_parallel.schedules.generators.registry import named_schedule
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.placements import stages_by_rank
from ms_parallel.schedules.table.schedule import Schedule

LIMIT_BYTES = 1 << 26
SEARCH = "search"
"""The choice that is measured and searched for before a run begins."""


class ScheduleTables:
    """The tables of one choice of schedule, each made once.

    Args:
        choice: a generator's name, a CSV file of torch.distributed.pipelining's form, or a table,
            with or without a split; all but names are of their own number of microbatches.
        ranks: pipeline ranks of the layout.

    Raises:
        ConfigError: the file cannot be read, or the table is for another number of ranks.
        ScheduleError: there is no such name, or the table is not right.
    """

    def __init__(self, choice: Choice, ranks: int) -> None:
        self.layers: tuple[int, ...] | None = None
        """Layers of each stage, where they are chosen."""
        if isinstance(choice, Staged):
            self.layers, choice = choice.layers, choice.schedule
        if choice == SEARCH:
            raise ConfigError(
                "schedule 'search' needs measured costs; call search_schedule first and give the"
                " engine what it finds"
            )
        if not isinstance(choice, Schedule) and is_file(choice):
            choice = read_schedule(choice)
        self.choice = choice
        self.ranks = ranks
        if not isinstance(choice, Schedule):
            self.placement = _generated(str(choice), ranks, ENOUGH * ranks).placement
            """Pipeline rank of each stage."""
            return
        if choice.ranks != ranks:
            raise ConfigError(
                f"the schedule is for {choice.ranks} ranks but pipeline={ranks}; "
                "choose one of as many"
            )
        verify(choice)
        self.placement = choice.placement

    def training(self, microbatches: int) -> Schedule:
        """Make the schedule of an update's forwards and backwards.

        Raises:
            ConfigError: the table that was chosen is for another number of microbatches.
            ScheduleError: the generator that was chosen cannot do with so few.
        """
        if not isinstance(self.choice, Schedule):
            return _generated(str(self.choice), self.ranks, microbatches)
        if self.choice.microbatches != microbatches:
            raise ConfigError(
                f"the schedule is of {self.choice.microbatches} microbatches but the batch "
                f"has {microbatches}; change microbatch_size or the schedule"
            )
        return self.choice

    def forwards(self, microbatches: int) -> Schedule:
        """Make a schedule of forwards alone, to evaluate or generate."""
        return _forwards(self.placement, microbatches)


ENOUGH = 2
"""Microbatches a rank with which every generator can make a table; the placement stays the same."""


def read_schedule(path: str | Path) -> Schedule:
    """Read and verify a CSV file in torch.distributed.pipelining's form.

    Raises:
        ConfigError: the file cannot be read.
        ScheduleError: it is no table, or a wrong one; the file is named.
    """
    where = f"schedule {path}"
    try:
        text = read_text(path, error=ConfigError, limit_bytes=LIMIT_BYTES)
    except ConfigError as error:
        raise ConfigError(f"schedule {error}") from error
    with decoding(where, error=ScheduleError):
        try:
            schedule = Schedule.from_csv(text, name=Path(path).stem)
            verify(schedule)
        except ScheduleError as error:
            raise ScheduleError(f"{where}: {error}") from error
    return schedule


def is_file(choice: str | Path) -> bool:
    """Return whether a choice of schedule names a CSV file."""
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
            for stage in mine
        ]
        for mine in stages_by_rank(placement)
    ]
    return Schedule.from_computations(rows, placement, microbatches, "forwards")
