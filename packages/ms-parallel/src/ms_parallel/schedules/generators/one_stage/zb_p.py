"""ZB1P and ZB2P: zero-bubble schedules for given costs (Qi 2023)."""

from ms_parallel.arguments import check_type
from ms_parallel.errors import ScheduleError
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
    """ZB1P: peak memory of 1F1B, i.e. up to `stages` live microbatches on every rank.

    Bubble for equal stages: (stages - 1) * (F + I - W), if W is not longer than F and I.

    Raises:
        ScheduleError: `microbatches` is below 1.
    """
    check_type("costs", costs, Costs, "Costs", error=ScheduleError)
    return _best_within(costs, microbatches, costs.stages, "ZB1P")


@generator("zb2p", placement=one_a_rank, from_costs=True)
def zb2p(costs: Costs, microbatches: int) -> Schedule:
    """ZB2P: twice the peak memory of 1F1B, i.e. up to `2 * stages` live microbatches per rank.

    For equal stages and times, the makespan exceeds the work by only (stages - 1) * F.

    Raises:
        ScheduleError: `microbatches` is below 1.
    """
    check_type("costs", costs, Costs, "Costs", error=ScheduleError)
    return _best_within(costs, microbatches, 2 * costs.stages, "ZB2P")


def _best_within(costs: Costs, microbatches: int, max_live: int, name: str) -> Schedule:
    """Best of several arrangements with at most `max_live` microbatches on every rank."""
    check_size(costs.stages, microbatches)
    ticks = costs.ticks()
    problem = Problem(
        ticks=ticks,
        placement=one_a_rank(costs.stages),
        microbatches=microbatches,
        caps=[max_live * size for size in ticks.activation],
    )
    return tabulate(problem, best(problem, _BUDGET).rows, name)
