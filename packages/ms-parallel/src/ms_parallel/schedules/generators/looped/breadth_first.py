"""Breadth-first: all microbatches through one stage, then the next (Lamy-Poirier 2023)."""

from ms_parallel.schedules.generators.registry import generator
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.placements import looped
from ms_parallel.schedules.table.schedule import Schedule


@generator("breadth-first", placement=looped)
def breadth_first(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """GPipe over looped stages: each stage's weights are gathered once per forward and backward.

    Raises:
        ScheduleError: an argument is below 1.
    """
    placement = looped(ranks, stages_per_rank)
    rows = []
    for rank in range(ranks):
        # Stages of the rank, `ranks` apart.
        stages = range(rank, len(placement), ranks)
        rows.append(
            [
                Action(kind, stage, microbatch)
                for kind, order in ((Kind.FORWARD, stages), (Kind.BACKWARD, reversed(stages)))
                for stage in order
                for microbatch in range(microbatches)
            ]
        )
    return Schedule.from_computations(rows, placement, microbatches, "breadth-first")
