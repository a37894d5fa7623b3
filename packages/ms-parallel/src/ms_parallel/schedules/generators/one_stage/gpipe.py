"""GPipe: every forward, then every backward (Huang et al. 2019)."""

from ms_parallel.schedules.generators.registry import generator
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.placements import one_a_rank
from ms_parallel.schedules.table.schedule import Schedule


@generator("gpipe", placement=one_a_rank)
def gpipe(stages: int, microbatches: int) -> Schedule:
    """Run all forwards, then all backwards in the same order; all microbatches are live at once.

    Args:
        stages: number of stages, one per rank.
        microbatches: microbatches per step.

    Raises:
        ScheduleError: `stages` or `microbatches` is below 1.
    """
    rows = [
        [
            Action(kind, stage, microbatch)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for microbatch in range(microbatches)
        ]
        for stage in range(stages)
    ]
    return Schedule.from_computations(rows, range(stages), microbatches, "GPipe")
