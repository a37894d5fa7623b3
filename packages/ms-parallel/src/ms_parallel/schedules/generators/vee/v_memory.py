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
    """Use half of 1F1B's memory at half its bubble, for equal times of F, I and W, free messages.

    Two stages a rank, as a V. Every rank holds at most `ranks + 2` activations of its half-size
    stages.

    Raises:
        ScheduleError: `ranks` or `microbatches` is below 1.
    """
    return _of_delays(ranks, microbatches, (0, 1, 0, 0), ranks + 2, "V-Half")


@generator("v-min", placement=vee)
def v_min(ranks: int, microbatches: int) -> Schedule:
    """Use a third of 1F1B's memory at two thirds of its bubble, for equal times and free messages.

    Two stages a rank, as a V. Every rank holds at most two thirds of `ranks`, rounded up, and 2
    activations of its half-size stages. Nothing waits in this block, so with unequal times or slow
    messages it stalls sooner than V-Half.

    Raises:
        ScheduleError: `ranks` or `microbatches` is below 1.
    """
    held = -(-2 * ranks // 3) + 2
    return _of_delays(ranks, microbatches, (0, 0, 0, 0), held, "V-Min")


def _of_delays(
    ranks: int, microbatches: int, delays: tuple[int, int, int, int], held: int, name: str
) -> Schedule:
    """Play a building block of unit times on a V, with room for `held` activations a rank."""
    check_size(ranks, microbatches)
    problem = Problem(
        ticks=Costs.uniform(2 * ranks).ticks(),
        placement=vee(ranks),
        microbatches=microbatches,
        caps=[held] * ranks,
    )
    block = unit_block(problem.placement, delays)
    arrangement = arrange(problem, keep_order(problem, block.order(microbatches)))
    return tabulate(problem, arrangement.rows, name)
