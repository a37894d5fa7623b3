"""1F1B: one forward, one backward in turn once the pipeline is full (PipeDream-Flush, 2020)."""

from ms_parallel.schedules.generators.registry import generator
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.placements import one_a_rank
from ms_parallel.schedules.table.schedule import Schedule


@generator("1f1b", placement=one_a_rank, begins_search=True)
def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Run stage s `stages - 1 - s` forwards ahead, so it holds at most `stages - s` microbatches.

    Bubble: (stages - 1) * (F + B), as GPipe's, for equal stages.

    Args:
        stages: Stages, one a rank.
        microbatches: Microbatches of one step.

    Raises:
        ScheduleError: `stages` or `microbatches` is below 1.
    """
    rows = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, microbatches)
        row = [Action(Kind.FORWARD, stage, microbatch) for microbatch in range(ahead)]
        for microbatch in range(microbatches):
            if microbatch + ahead < microbatches:
                row.append(Action(Kind.FORWARD, stage, microbatch + ahead))
            row.append(Action(Kind.BACKWARD, stage, microbatch))
        rows.append(row)
    return Schedule.from_computations(rows, range(stages), microbatches, "1F1B")
