"""V-Half and V-Min: less memory than 1F1B for some of its bubble (Qi et al. 2024)."""

from ms_parallel.schedules.construction.building_block import unit_block
from ms_parallel.schedules.construction.list_scheduler import arrange
from ms_parallel.schedules.construction.policies import keep_order
from ms_parallel.schedules.construction.problem import Problem
from ms_parallel.schedules.construction.tabulate import tabulate
from ms_parallel.schedules.generators.registry import generator
from ms_parallel.schedules.table.costs import Costs
from ms_parallel.schedules.table.placements import vee
from ms_parallel.schedules.table.schedule import Schedule, check_size


@generator("v-half", placement=vee)
def v_half(ranks: int, microbatches: int) -> Schedule:
    """V-Half: half of 1F1B's memory and bubble, for equal times of F, I and W and free messages.

    V with two stages per rank. Every rank has at most `ranks + 2` live activations of its half-size
    stages.

    Raises:
        ScheduleError: `ranks` or `microbatches` is below 1.
    """
    return _from_delays(ranks, microbatches, (0, 1, 0, 0), ranks + 2, "V-Half")


@generator("v-min", placement=vee)
def v_min(ranks: int, microbatches: int) -> Schedule:
    """V-Min: a third of 1F1B's memory and two thirds of its bubble, for equal times, free messages.

    V with two stages per rank. Every rank has at most two thirds of `ranks` (rounded up) plus 2
    live activations of its half-size stages. The block has no slack, so with unequal times or slow
    messages it stalls sooner than V-Half.

    Raises:
        ScheduleError: `ranks` or `microbatches` is below 1.
    """
    # Two thirds of the ranks, rounded up, plus 2.
    max_live = -(-2 * ranks // 3) + 2
    return _from_delays(ranks, microbatches, (0, 0, 0, 0), max_live, "V-Min")


def _from_delays(
    ranks: int, microbatches: int, delays: tuple[int, int, int, int], max_live: int, name: str
) -> Schedule:
    """Schedule a unit-time building block on a V, with up to `max_live` activations per rank."""
    check_size(ranks, microbatches)
    problem = Problem(
        ticks=Costs.uniform(2 * ranks).ticks(),
        placement=vee(ranks),
        microbatches=microbatches,
        caps=[max_live] * ranks,
    )
    block = unit_block(problem.placement, delays)
    arrangement = arrange(problem, keep_order(problem, block.order(microbatches)))
    return tabulate(problem, arrangement.rows, name)
