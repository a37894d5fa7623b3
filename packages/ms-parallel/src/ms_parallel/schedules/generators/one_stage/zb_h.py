"""ZB-H1 and ZB-H2: 1F1B with backwards of weights delayed, by hand for equal times (Qi 2023)."""

from ms_parallel.schedules.generators.registry import generator
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.placements import one_a_rank
from ms_parallel.schedules.table.schedule import Schedule


@generator("zb-h1", placement=one_a_rank, begins_search=True)
def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Use 1F1B's memory and a third of its bubble, for equal times of F, I and W.

    Holds `stages` microbatches on every rank. Bubble: (stages - 1) * (F + I - W).

    Raises:
        ScheduleError: `stages` or `microbatches` is below 1.
    """
    rows = _rows(stages, microbatches, per_hop=1)
    return Schedule.from_computations(rows, range(stages), microbatches, "ZB-H1")


@generator("zb-h2", placement=one_a_rank, begins_search=True)
def zb_h2(stages: int, microbatches: int) -> Schedule:
    """Use twice 1F1B's memory; no bubble between first and last action, for equal times.

    Holds `2 * stages - 1` microbatches on every rank. With at least that many microbatches no rank
    idles between its first and last action; the makespan still exceeds the work by
    (stages - 1) * F.

    Raises:
        ScheduleError: `stages` or `microbatches` is below 1.
    """
    rows = _rows(stages, microbatches, per_hop=2)
    return Schedule.from_computations(rows, range(stages), microbatches, "ZB-H2")


def _rows(stages: int, microbatches: int, per_hop: int) -> list[list[Action]]:
    """Make 1F1B with split backwards; stage s runs `per_hop * (stages - 1 - s)` forwards ahead.

    Its backwards of weights follow `per_hop * s` microbatches behind those of inputs, so every
    rank holds the same `per_hop * (stages - 1) + 1` microbatches.
    """
    rows = []
    for stage in range(stages):
        ahead, behind = per_hop * (stages - 1 - stage), per_hop * stage
        row = []
        for step in range(microbatches + ahead + behind):
            for kind, number in (
                (Kind.FORWARD, step),
                (Kind.BACKWARD_INPUT, step - ahead),
                (Kind.BACKWARD_WEIGHT, step - ahead - behind),
            ):
                if 0 <= number < microbatches:
                    row.append(Action(kind, stage, number))
        rows.append(row)
    return rows
