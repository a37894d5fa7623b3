"""Scheduling problem, policy and arrangement, in integers."""

from collections.abc import Sequence
from fractions import Fraction

from attrs import evolve, field, frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.costs import Costs, Number, Ticks, as_fraction
from ms_parallel.schedules.table.placements import integers, ranks_of

Operation = tuple[int, int, int]
"""(0 forward, 1 input backward or 2 weight backward; stage; microbatch)."""
Rows = tuple[tuple[Operation, ...], ...]
"""Operations of each rank, in order."""


@frozen(kw_only=True)
class Problem:
    """Costs, placement, microbatches and memory caps, in ticks of time and memory."""

    ticks: Ticks
    placement: tuple[int, ...] = field(converter=integers)
    microbatches: int
    caps: tuple[int, ...] = field(converter=integers)
    """Activation memory limit of each rank."""
    split: bool = True
    """False: backwards are not split; `ticks` has their full time as input backward, and no time or
    memory for weight backwards."""

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.caps)

    @property
    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Ticks of forwards, input backwards and weight backwards of each stage."""
        return self.ticks.forward, self.ticks.backward_input, self.ticks.backward_weight

    @property
    def longest_work(self) -> int:
        """Ticks that the busiest rank computes per microbatch."""
        work = [0] * self.ranks
        for stage, rank in enumerate(self.placement):
            work[rank] += self.ticks.work(stage)
        return max(work)

    @property
    def actions(self) -> int:
        """Number of operations: forwards, input backwards and weight backwards."""
        return 3 * self.ticks.stages * self.microbatches

    def check_cap(self, rank: int, cap: Fraction) -> None:
        """Check that a memory cap, in the unit of the costs, suffices for `rank`.

        Raises:
            ScheduleError: it does not; names the minimum.
        """
        minimum = Fraction(self.min_memory(rank), self.ticks.memory_per_unit)
        if cap < minimum:
            raise ScheduleError(
                f"rank {rank} needs at least {float(minimum):g} of activation memory, got"
                f" {float(cap):g}"
            )

    def min_memory(self, rank: int) -> int:
        """Memory for one microbatch in each stage of `rank`, the minimum to make progress."""
        return sum(
            size
            for size, stage_rank in zip(self.ticks.activation, self.placement, strict=True)
            if stage_rank == rank
        )


@frozen(kw_only=True)
class ListPolicy:
    """Policy of the list scheduler; all times in ticks."""

    period: int
    """Due time difference between consecutive microbatches."""
    forward: tuple[int, ...]
    """Due time of microbatch 0's forward, for each stage."""
    backward: tuple[int, ...]
    """Due time of microbatch 0's input backward, for each stage."""
    weight_delay: int | None = None
    """Due time of a weight backward after its input backward. None: no due time; weight backwards
    only fill idle time and free memory."""
    patience: int = 0
    """Time that a rank may idle for a message with a smaller key instead of starting a forward."""
    weight_overrun: int = 0
    """Time by which a weight backward that fills a gap may delay an expected message."""
    order: Rows | None = None
    """Order of forwards and input backwards per rank that overrides the keys; weight backwards in
    a row are ignored and placed again."""


@frozen(kw_only=True)
class Arrangement:
    """Result of the list scheduler."""

    rows: Rows
    """Operations of each rank, in order."""
    makespan: int
    peaks: tuple[int, ...]


def problem_of(
    costs: Costs,
    memory_cap: Number | Sequence[Number] | None,
    microbatches: int,
    placement: tuple[int, ...],
    split: bool = True,
) -> Problem:
    """Build the problem that `search` solves for one placement; see there for the arguments.

    Raises:
        ScheduleError: the cap is too small, or the number of caps differs from the ranks.
    """
    ticks, ranks = costs.ticks(), ranks_of(placement)
    if not split:
        ticks = _unsplit_backwards(ticks)
    problem = Problem(
        ticks=ticks, placement=placement, microbatches=microbatches, caps=[0] * ranks, split=split
    )
    # No limit: all microbatches live in every stage at once.
    caps = [problem.min_memory(rank) * microbatches for rank in range(ranks)]
    if memory_cap is None:
        return evolve(problem, caps=caps)
    # One cap for all ranks, or one per rank.
    limits = [memory_cap] * ranks if isinstance(memory_cap, Number) else list(memory_cap)
    if len(limits) != ranks:
        raise ScheduleError(
            f"{len(limits)} memory caps for {ranks} ranks; use one for all ranks or one per rank"
        )
    # Largest minimum first, so that the error names a cap that suffices for every rank.
    for rank in sorted(range(ranks), key=problem.min_memory, reverse=True):
        cap = _cap(limits[rank])
        problem.check_cap(rank, cap)
        # Rounding down is safe: memory in ticks is an integer.
        caps[rank] = min(caps[rank], int(cap * ticks.memory_per_unit))
    return evolve(problem, caps=caps)


def _cap(value: Number) -> Fraction:
    try:
        return as_fraction(value)
    except ScheduleError:
        raise ScheduleError(
            f"a memory cap must be a number above 0, got {value}; use None for no limit"
        ) from None


def _unsplit_backwards(ticks: Ticks) -> Ticks:
    """Assign the time of unsplit backwards to the input backward; weight backwards take none."""
    zeros = (0,) * ticks.stages
    backward = tuple(
        i + w for i, w in zip(ticks.backward_input, ticks.backward_weight, strict=True)
    )
    return evolve(ticks, backward_input=backward, backward_weight=zeros, retained=zeros)
