"""ZB1P and its kin: zero-bubble schedules of one stage a rank, made for given costs (Qi 2023)."""

from ms_parallel.schedules.construction.list_scheduler import Problem
from ms_parallel.schedules.construction.portfolio import best
from ms_parallel.schedules.table.costs import Costs
from ms_parallel.schedules.table.placements import one_a_rank
from ms_parallel.schedules.table.schedule import Schedule, check_size

__all__ = ["zb1p", "zero_bubble"]

_BUDGET = 100_000


def zero_bubble(costs: Costs, microbatches: int, held: int, name: str) -> Schedule:
    """The best of some arrangements in which no rank holds more than `held` microbatches."""
    check_size(costs.stages, microbatches)
    ticks = costs.ticks()
    problem = Problem(
        ticks=ticks,
        placement=one_a_rank(costs.stages),
        microbatches=microbatches,
        caps=[held * size for size in ticks.activation],
    )
    return best(problem, _BUDGET).schedule(problem, name)


def zb1p(costs: Costs, microbatches: int) -> Schedule:
    """Holds as many microbatches as 1F1B's first rank, one for each stage, on every rank.

    For equal stages its bubble is (stages - 1) * (F + I - W) where W is no longer than F and I.

    Raises:
        ScheduleError: `microbatches` is below 1.
    """
    return zero_bubble(costs, microbatches, costs.stages, "ZB1P")
