"""A scheduling problem, a policy that solves it, and the arrangement that results, all integers."""

from collections.abc import Sequence
from fractions import Fraction

from attrs import evolve, field, frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.costs import Costs, Number, Ticks, as_fraction
from ms_parallel.schedules.table.placements import integers, ranks_of

Operation = tuple[int, int, int]
"""(0 forward, 1 backward of inputs, 2 backward of weights; stage; microbatch)."""
Rows = tuple[tuple[Operation, ...], ...]
"""For each rank its operations, in order."""


@frozen(kw_only=True)
class Problem:
    """Costs, placement, microbatches and memory caps; times and memory in ticks."""

    ticks: Ticks
    placement: tuple[int, ...] = field(converter=integers)
    microbatches: int
    caps: tuple[int, ...] = field(converter=integers)
    """Most activation memory of each rank."""
    split: bool = True
    """False: backwards are whole; `ticks` then has their full time as that of inputs, and no time
    or memory for weights."""

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.caps)

    @property
    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Ticks of forwards, backwards of inputs and of weights, for each stage."""
        return self.ticks.forward, self.ticks.backward_input, self.ticks.backward_weight

    @property
    def longest_work(self) -> int:
        """Ticks that the busiest rank computes for one microbatch."""
        work = [0] * self.ranks
        for stage, rank in enumerate(self.placement):
            work[rank] += self.ticks.work(stage)
        return max(work)

    @property
    def actions(self) -> int:
        """Forwards and backwards, in two parts each, of all stages and microbatches."""
        return 3 * self.ticks.stages * self.microbatches

    def check_cap(self, rank: int, cap: Fraction) -> None:
        """Refuse a cap, in the unit of the costs, in which `rank` cannot work.

        Raises:
            ScheduleError: with the least that works.
        """
        least = Fraction(self.least(rank), self.ticks.memory_per_unit)
        if cap < least:
            raise ScheduleError(
                f"rank {rank} cannot work in {float(cap):g} of activation memory; "
                f"the least that works is {float(least):g}"
            )

    def least(self, rank: int) -> int:
        """Compute the memory that `rank` needs to hold one microbatch in each of its stages."""
        return sum(
            size
            for size, home in zip(self.ticks.activation, self.placement, strict=True)
            if home == rank
        )


@frozen(kw_only=True)
class ListPolicy:
    """How the list scheduler chooses; all times in ticks."""

    period: int
    """Due time between one microbatch and the next."""
    forward: tuple[int, ...]
    """For each stage the due time of microbatch 0's forward."""
    backward: tuple[int, ...]
    """For each stage the due time of microbatch 0's backward of inputs."""
    weight_delay: int | None = None
    """Time after its backward of inputs at which a backward of weights is due; None: never, it
    only fills idle time and makes room."""
    patience: int = 0
    """Time that a rank idles for a known message of smaller key rather than start a forward."""
    weight_overrun: int = 0
    """Time by which a filling backward of weights may delay a message that is known to come."""
    order: Rows | None = None
    """For each rank its forwards and backwards of inputs, to be kept in this order whatever the
    keys; a row may hold backwards of weights, which are placed anew."""


@frozen(kw_only=True)
class Arrangement:
    """The rows that the list scheduler made."""

    rows: Rows
    """For each rank its operations in order."""
    makespan: int
    peaks: tuple[int, ...]


def problem_of(
    costs: Costs,
    memory_cap: Number | Sequence[Number] | None,
    microbatches: int,
    placement: tuple[int, ...],
    split: bool = True,
) -> Problem:
    """Set up the problem that `search` solves for one placement; see there for the arguments.

    Raises:
        ScheduleError: the cap is below the least that works, or not one for each rank.
    """
    ticks, ranks = costs.ticks(), ranks_of(placement)
    if not split:
        ticks = _whole_backwards(ticks)
    problem = Problem(
        ticks=ticks, placement=placement, microbatches=microbatches, caps=[0] * ranks, split=split
    )
    most = [problem.least(rank) * microbatches for rank in range(ranks)]
    if memory_cap is None:
        return evolve(problem, caps=most)
    given = [memory_cap] * ranks if isinstance(memory_cap, Number) else list(memory_cap)
    if len(given) != ranks:
        raise ScheduleError(
            f"{len(given)} memory caps for {ranks} ranks; give one for all or one for each"
        )
    for rank in sorted(range(ranks), key=problem.least, reverse=True):
        cap = _cap(given[rank])
        problem.check_cap(rank, cap)
        most[rank] = min(most[rank], int(cap * ticks.memory_per_unit))
    return evolve(problem, caps=most)


def _cap(value: Number) -> Fraction:
    try:
        return as_fraction(value)
    except ScheduleError:
        raise ScheduleError(
            f"a memory cap of {value} is no amount of memory; give a number above 0, or none at all"
        ) from None


def _whole_backwards(ticks: Ticks) -> Ticks:
    """Count the time of both parts of a backward as that of inputs; weights take none."""
    nothing = (0,) * ticks.stages
    both = tuple(i + w for i, w in zip(ticks.backward_input, ticks.backward_weight, strict=True))
    return evolve(ticks, backward_input=both, backward_weight=nothing, retained=nothing)
