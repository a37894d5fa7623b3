"""1F1B: alternate forward and backward once the pipeline is full (PipeDream-Flush, 2020)."""

from ms_parallel.schedules.generators.registry import generator
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.placements import one_a_rank
from ms_parallel.schedules.table.schedule import Schedule


@generator("1f1b", placement=one_a_rank, seeds_search=True)
def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B: stage s runs `stages - 1 - s` forwards ahead; at most `stages - s` are live.

    Bubble: (stages - 1) * (F + B) for equal stages, as with GPipe.

    Args:
        stages: number of stages, one per rank.
        microbatches: microbatches per step.

    Raises:
        ScheduleError: `stages` or `microbatches` is below 1.
    """
    rows = []
    for stage in range(stages):
        # Warm-up forwards; later stages need fewer, as gradients reach them sooner.
        ahead = min(stages - 1 - stage, microbatches)
        row = [Action(Kind.FORWARD, stage, microbatch) for microbatch in range(ahead)]
        for microbatch in range(microbatches):
            if microbatch + ahead < microbatches:
                row.append(Action(Kind.FORWARD, stage, microbatch + ahead))
            row.append(Action(Kind.BACKWARD, stage, microbatch))
        rows.append(row)
    return Schedule.from_computations(rows, range(stages), microbatches, "1F1B")
