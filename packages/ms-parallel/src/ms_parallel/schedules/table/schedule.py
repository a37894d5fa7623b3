"""`Schedule`: immutable table of the actions of every pipeline rank, in order."""

from collections.abc import Iterable, Sequence
from numbers import Integral

from attrs import field, frozen

from ms_parallel.arguments import check_items, check_type
from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import MESSAGES, Action, Kind, parse_action
from ms_parallel.schedules.table.communication import with_communication
from ms_parallel.schedules.table.costs import Ticks
from ms_parallel.schedules.table.placements import integers


def _rows(rows: Iterable[Iterable[Action]]) -> tuple[tuple[Action, ...], ...]:
    check_type("actions", rows, Iterable, "a list of actions per rank", error=ScheduleError)
    table = []
    for row in rows:
        check_type("a rank's actions", row, Iterable, "a list of actions", error=ScheduleError)
        actions = tuple(row)
        check_items("a rank's actions", actions, Action, "actions", error=ScheduleError)
        table.append(actions)
    return tuple(table)


@frozen(kw_only=True)
class Schedule:
    """A pipeline's program as a value; only `verify` proves that it is correct."""

    placement: tuple[int, ...] = field(converter=integers)
    """Rank of each stage; `(0, 1, 1, 0)` is a V over two ranks."""
    microbatches: int
    """Microbatches per optimizer step."""
    actions: tuple[tuple[Action, ...], ...] = field(converter=_rows, repr=False)
    """Actions of each rank in the order to run them, including communication."""
    name: str = ""
    """Name in reports and pictures."""

    def __attrs_post_init__(self) -> None:
        check_size(len(self.placement), self.microbatches)
        if sorted(set(self.placement)) != list(range(len(self.actions))):
            raise ScheduleError(
                f"placement {self.placement} leaves some of the {len(self.actions)} ranks unused; "
                "every rank needs at least one stage and every stage a rank"
            )

    @classmethod
    def from_computations(
        cls,
        rows: Sequence[Sequence[Action]],
        placement: Sequence[int],
        microbatches: int,
        name: str = "",
        ticks: Ticks | None = None,
    ) -> "Schedule":
        """Build a schedule from computations, and insert sends and receives.

        `ticks` are the durations used to place receives; see `with_communication`.

        Raises:
            ScheduleError: the rows deadlock, or an action is not on the rank of its stage.
        """
        check_size(len(placement), microbatches)
        return cls(
            placement=tuple(placement),
            microbatches=microbatches,
            actions=with_communication(rows, placement, ticks),
            name=name,
        )

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.placement)

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of `rank`, in ascending order."""
        return tuple(stage for stage, stage_rank in enumerate(self.placement) if stage_rank == rank)

    def computations(self) -> tuple[tuple[Action, ...], ...]:
        """Computations of each rank, in order; a pair is one entry."""
        return tuple(tuple(a for a in row if a.computations) for row in self.actions)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart from the gradients of inputs."""
        actions = (action for row in self.computations() for action in row)
        return any(part.kind is Kind.BACKWARD_INPUT for action in actions for part in action.flat)

    def to_csv(self, *, communication: bool = True) -> str:
        """Return the table in the CSV format of torch.distributed.pipelining, one line per rank.

        Args:
            communication: include sends and receives (torch's "compute_comms" format); without
                them the text is in torch's "compute_only" format. Since 2.15 torch needs the
                latter, as "compute_comms" must name the waits for sends.
        """
        drop = frozenset() if communication else MESSAGES
        rows = ([str(a) for a in row if a.kind not in drop] for row in self.actions)
        return "".join(",".join(row) + "\n" for row in rows)

    @classmethod
    def from_csv(cls, text: str, *, name: str = "") -> "Schedule":
        """Parse a table in the CSV format of torch.distributed.pipelining.

        Each line is a rank. Empty cells are idle steps and are dropped. Sends and receives are
        inserted if the text has none. The placement and the number of microbatches are inferred.

        Raises:
            ScheduleError: a cell is not an action, a stage is on two ranks or none, or the table
                is empty. `verify` checks whether the schedule is complete.
        """
        rows = [_parse_line(number, line) for number, line in enumerate(text.splitlines())]
        # Every stage must appear on exactly one rank.
        placement = _placement_of(rows)
        # Actions on a stage have microbatch -1.
        microbatches = 1 + max(a.microbatch for row in rows for action in row for a in action.flat)
        # A "compute_only" table has no messages, so insert them.
        if any(a.kind in MESSAGES for row in rows for a in row):
            return cls(placement=placement, microbatches=microbatches, actions=rows, name=name)
        return cls.from_computations(rows, placement, microbatches, name)


def check_size(stages: int, microbatches: int) -> None:
    """Reject an empty schedule.

    Raises:
        ScheduleError: `stages` or `microbatches` is below 1.
    """
    check_type("microbatches", microbatches, Integral, "an integer", error=ScheduleError)
    if stages < 1 or microbatches < 1:
        raise ScheduleError(
            f"a schedule needs at least 1 stage and 1 microbatch, got {stages} stages and "
            f"{microbatches} microbatches"
        )


def _parse_line(rank: int, line: str) -> list[Action]:
    row: list[Action] = []
    for column, cell in enumerate(line.split(",")):
        if not cell.strip():
            continue
        try:
            row.append(parse_action(cell.strip()))
        except ScheduleError as error:
            raise ScheduleError(f"line {rank + 1}, cell {column + 1}: {error}") from None
    if not row:
        raise ScheduleError(f"line {rank + 1} has no actions; every rank needs a line with actions")
    return row


def _placement_of(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    rank_of_stage: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            for part in action.flat:
                if rank_of_stage.setdefault(part.stage, rank) != rank:
                    raise ScheduleError(
                        f"{part} on line {rank + 1}: stage {part.stage} is already on line "
                        f"{rank_of_stage[part.stage] + 1}; a stage must be on one rank"
                    )
    if not rank_of_stage:
        raise ScheduleError("the table has no actions; write one line per rank")
    missing = next(
        (stage for stage in range(len(rank_of_stage)) if stage not in rank_of_stage), None
    )
    if missing is not None:
        raise ScheduleError(
            f"stage {missing} has no action but stage {max(rank_of_stage)} has; number the stages "
            "from 0 without gaps"
        )
    return tuple(rank_of_stage[stage] for stage in range(len(rank_of_stage)))
