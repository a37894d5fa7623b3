"""V-Min: a third of 1F1B's memory at two thirds of its bubble (Qi et al. 2024)."""

from ms_parallel.schedules.generators.vee.v_half import vee_of_delays
from ms_parallel.schedules.table.schedule import Schedule

__all__ = ["v_min"]


def v_min(ranks: int, microbatches: int) -> Schedule:
    """Made for equal times of F, I and W and free messages; two stages a rank, as a V.

    Every rank holds at most two thirds of `ranks`, rounded up, and 2 activations of its half-size
    stages. Nothing waits in this block, so with unequal times or slow messages it stalls sooner
    than V-Half.

    Raises:
        ScheduleError: `ranks` or `microbatches` is below 1.
    """
    held = -(-2 * ranks // 3) + 2
    return vee_of_delays(ranks, microbatches, (0, 0, 0, 0), held, "V-Min")
