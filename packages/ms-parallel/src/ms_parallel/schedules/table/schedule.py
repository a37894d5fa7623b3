"""`Schedule`: the immutable table of what every rank of a pipeline does, in order."""

from collections.abc import Iterable, Sequence

from attrs import field, frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import MESSAGES, Action, parse_action
from ms_parallel.schedules.table.communication import with_communication
from ms_parallel.schedules.table.costs import Ticks
from ms_parallel.schedules.table.placements import integers


def _rows(rows: Iterable[Iterable[Action]]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(row) for row in rows)


@frozen(kw_only=True)
class Schedule:
    """A pipeline's program as a value. It promises nothing until `verify` has passed it."""

    placement: tuple[int, ...] = field(converter=integers)
    """Rank of each stage; `(0, 1, 1, 0)` is a V over two ranks."""
    microbatches: int
    """Microbatches of one optimizer step."""
    actions: tuple[tuple[Action, ...], ...] = field(converter=_rows, repr=False)
    """For each rank its actions, communication included, to be performed in this order."""
    name: str = ""
    """What it is called in reports and pictures."""

    def __attrs_post_init__(self) -> None:
        check_size(len(self.placement), self.microbatches)
        if sorted(set(self.placement)) != list(range(len(self.actions))):
            raise ScheduleError(
                f"placement {self.placement} does not use each of the {len(self.actions)} ranks; "
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
        """Build a schedule from forwards and backwards alone; sends and receives are inserted.

        `ticks` are the durations by which receives are placed; see `with_communication`.

        Raises:
            ScheduleError: the rows wait for one another in a circle, or are misplaced.
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
        """Stages of the model, over all ranks."""
        return len(self.placement)

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """List the stages that live on `rank`, ascending."""
        return tuple(stage for stage, home in enumerate(self.placement) if home == rank)

    def computations(self) -> tuple[tuple[Action, ...], ...]:
        """List for each rank its forwards and backwards in order; a pair is one entry."""
        return tuple(tuple(a for a in row if a.computations) for row in self.actions)

    def to_csv(self, *, communication: bool = True) -> str:
        """Return the table in torch.distributed.pipelining's CSV form, a line a rank.

        Args:
            communication: Write sends and receives too (torch's "compute_comms" form);
                without them the text is torch's "compute_only" form. Torch itself wants the
                latter from 2.15 on, as sends in the former must then be waited for by name.
        """
        drop = frozenset() if communication else MESSAGES
        rows = ([str(a) for a in row if a.kind not in drop] for row in self.actions)
        return "".join(",".join(row) + "\n" for row in rows)

    @classmethod
    def from_csv(cls, text: str, *, name: str = "") -> "Schedule":
        """Read a table in torch.distributed.pipelining's CSV form, strictly.

        A line is a rank. Empty cells are idle steps and are dropped. Sends and receives are
        inserted if the text has none. The placement and the number of microbatches follow from
        the actions.

        Raises:
            ScheduleError: a cell is not an action, a stage is on two ranks or on none, or the
                table is empty. Whether the schedule is complete is for `verify` to say.
        """
        rows = [_parse_line(number, line) for number, line in enumerate(text.splitlines())]
        placement = _placement_of(rows)
        microbatches = 1 + max(a.microbatch for row in rows for each in row for a in each.flat)
        if any(a.kind in MESSAGES for row in rows for a in row):
            return cls(placement=placement, microbatches=microbatches, actions=rows, name=name)
        return cls.from_computations(rows, placement, microbatches, name)


def check_size(stages: int, microbatches: int) -> None:
    """Refuse a schedule of nothing.

    Raises:
        ScheduleError: `stages` or `microbatches` is below 1.
    """
    if stages < 1 or microbatches < 1:
        raise ScheduleError(
            f"a schedule of {stages} stages and {microbatches} microbatches does no work; "
            "give at least 1 of each"
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
        raise ScheduleError(f"line {rank + 1} holds no actions; every rank has a line with some")
    return row


def _placement_of(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    homes: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            for part in action.flat:
                if homes.setdefault(part.stage, rank) != rank:
                    raise ScheduleError(
                        f"{part} on line {rank + 1}: stage {part.stage} is already on line "
                        f"{homes[part.stage] + 1}; a stage lives on one rank"
                    )
    if not homes:
        raise ScheduleError("the table holds no actions; give one line a rank")
    missing = next((stage for stage in range(len(homes)) if stage not in homes), None)
    if missing is not None:
        raise ScheduleError(
            f"stage {missing} has no action though stage {max(homes)} has; number the "
            "stages from 0 without gaps"
        )
    return tuple(homes[stage] for stage in range(len(homes)))
