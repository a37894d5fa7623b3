"""V-Half: half of 1F1B's memory at half of its bubble (Qi et al. 2024)."""

from ms_parallel.schedules.construction.building_block import unit_block
from ms_parallel.schedules.construction.list_scheduler import Problem, arrange
from ms_parallel.schedules.construction.portfolio import keep_order
from ms_parallel.schedules.table.costs import Costs
from ms_parallel.schedules.table.placements import vee
from ms_parallel.schedules.table.schedule import Schedule, check_size

__all__ = ["v_half", "vee_of_delays"]


def vee_of_delays(
    ranks: int, microbatches: int, delays: tuple[int, int, int, int], held: int, name: str
) -> Schedule:
    """A building block of unit times on a V, played with room for `held` activations a rank."""
    check_size(ranks, microbatches)
    problem = Problem(
        ticks=Costs.uniform(2 * ranks).ticks(),
        placement=vee(ranks),
        microbatches=microbatches,
        caps=[held] * ranks,
    )
    block = unit_block(problem.placement, delays)
    return arrange(problem, keep_order(problem, block.order(microbatches))).schedule(problem, name)


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Made for equal times of F, I and W and free messages; two stages a rank, as a V.

    Every rank holds at most `ranks + 2` activations of its half-size stages.

    Raises:
        ScheduleError: `ranks` or `microbatches` is below 1.
    """
    return vee_of_delays(ranks, microbatches, (0, 1, 0, 0), ranks + 2, "V-Half")
