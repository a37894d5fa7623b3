"""ZB2P: with twice 1F1B's memory, for given costs (Qi 2023)."""

from ms_parallel.schedules.generators.one_stage.zb1p import zero_bubble
from ms_parallel.schedules.table.costs import Costs
from ms_parallel.schedules.table.schedule import Schedule

__all__ = ["zb2p"]


def zb2p(costs: Costs, microbatches: int) -> Schedule:
    """Holds twice as many microbatches as stages on every rank.

    For equal stages of equal times the makespan exceeds the work by (stages - 1) * F alone.

    Raises:
        ScheduleError: `microbatches` is below 1.
    """
    return zero_bubble(costs, microbatches, 2 * costs.stages, "ZB2P")
