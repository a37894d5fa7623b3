"""ZB-H1 and ZB-H2: 1F1B with delayed weight backwards, handcrafted for equal times (Qi 2023)."""

from ms_parallel.schedules.generators.registry import generator
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.placements import one_a_rank
from ms_parallel.schedules.table.schedule import Schedule


@generator("zb-h1", placement=one_a_rank, seeds_search=True)
def zb_h1(stages: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B's memory and a third of its bubble, for equal times of F, I and W.

    Every rank has up to `stages` live microbatches. Bubble: (stages - 1) * (F + I - W).

    Raises:
        ScheduleError: `stages` or `microbatches` is below 1.
    """
    rows = _rows(stages, microbatches, per_hop=1)
    return Schedule.from_computations(rows, range(stages), microbatches, "ZB-H1")


@generator("zb-h2", placement=one_a_rank, seeds_search=True)
def zb_h2(stages: int, microbatches: int) -> Schedule:
    """ZB-H2: twice 1F1B's memory, no bubble between first and last action, for equal times.

    Every rank has up to `2 * stages - 1` live microbatches. With at least `2 * stages - 1`
    microbatches no rank idles between its first and last action; the makespan still exceeds the
    work by (stages - 1) * F.

    Raises:
        ScheduleError: `stages` or `microbatches` is below 1.
    """
    rows = _rows(stages, microbatches, per_hop=2)
    return Schedule.from_computations(rows, range(stages), microbatches, "ZB-H2")


def _rows(stages: int, microbatches: int, per_hop: int) -> list[list[Action]]:
    """Rows of 1F1B with split backwards. Stage s runs `per_hop * (stages - 1 - s)` forwards ahead.

    Weight backwards lag `per_hop * s` microbatches behind input backwards, so every rank has the
    same number of live microbatches, `per_hop * (stages - 1) + 1`.
    """
    rows = []
    for stage in range(stages):
        ahead, lag = per_hop * (stages - 1 - stage), per_hop * stage
        row = []
        for step in range(microbatches + ahead + lag):
            for kind, number in (
                (Kind.FORWARD, step),
                (Kind.BACKWARD_INPUT, step - ahead),
                (Kind.BACKWARD_WEIGHT, step - ahead - lag),
            ):
                if 0 <= number < microbatches:
                    row.append(Action(kind, stage, number))
        rows.append(row)
    return rows
