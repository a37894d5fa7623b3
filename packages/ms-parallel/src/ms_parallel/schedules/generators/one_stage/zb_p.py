"""ZB1P and ZB2P: zero-bubble schedules made for given costs (Qi 2023)."""

from ms_parallel.schedules.construction.portfolio import best
from ms_parallel.schedules.construction.problem import Problem
from ms_parallel.schedules.construction.tabulate import tabulate
from ms_parallel.schedules.generators.registry import generator
from ms_parallel.schedules.table.costs import Costs
from ms_parallel.schedules.table.placements import one_a_rank
from ms_parallel.schedules.table.schedule import Schedule, check_size

_BUDGET = 100_000


@generator("zb1p", placement=one_a_rank, from_costs=True)
def zb1p(costs: Costs, microbatches: int) -> Schedule:
    """Hold as many microbatches as 1F1B's first rank, one for each stage, on every rank.

    For equal stages its bubble is (stages - 1) * (F + I - W) where W is no longer than F and I.

    Raises:
        ScheduleError: `microbatches` is below 1.
    """
    return _best_within(costs, microbatches, costs.stages, "ZB1P")


@generator("zb2p", placement=one_a_rank, from_costs=True)
def zb2p(costs: Costs, microbatches: int) -> Schedule:
    """Hold twice as many microbatches as stages on every rank.

    For equal stages of equal times the makespan exceeds the work by (stages - 1) * F alone.

    Raises:
        ScheduleError: `microbatches` is below 1.
    """
    return _best_within(costs, microbatches, 2 * costs.stages, "ZB2P")


def _best_within(costs: Costs, microbatches: int, held: int, name: str) -> Schedule:
    """Find the best of some arrangements in which no rank holds more than `held` microbatches."""
    check_size(costs.stages, microbatches)
    ticks = costs.ticks()
    problem = Problem(
        ticks=ticks,
        placement=one_a_rank(costs.stages),
        microbatches=microbatches,
        caps=[held * size for size in ticks.activation],
    )
    return tabulate(problem, best(problem, _BUDGET).rows, name)
