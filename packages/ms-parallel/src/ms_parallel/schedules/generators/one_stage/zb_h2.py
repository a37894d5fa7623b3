"""ZB-H2: twice 1F1B's memory and no bubble between a rank's first and last action (Qi 2023)."""

from ms_parallel.schedules.generators.one_stage.zb_h1 import split_one_f_one_b
from ms_parallel.schedules.table.schedule import Schedule

__all__ = ["zb_h2"]


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """Hand-made for equal times of F, I and W; holds `2 * stages - 1` microbatches on every rank.

    With at least that many microbatches no rank idles between its first and last action; the
    makespan still exceeds the work by (stages - 1) * F.

    Raises:
        ScheduleError: `stages` or `microbatches` is below 1.
    """
    rows = split_one_f_one_b(stages, microbatches, per_hop=2)
    return Schedule.from_computations(rows, range(stages), microbatches, "ZB-H2")
