"""ZB-H1: 1F1B's memory, a third of its bubble, by delaying backwards of weights (Qi 2023)."""

from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.schedule import Schedule

__all__ = ["split_one_f_one_b", "zb_h1"]


def split_one_f_one_b(stages: int, microbatches: int, per_hop: int) -> list[list[Action]]:
    """1F1B with split backwards; stage s runs `per_hop * (stages - 1 - s)` forwards ahead.

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


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Hand-made for equal times of F, I and W; holds `stages` microbatches on every rank.

    Bubble: (stages - 1) * (F + I - W).

    Raises:
        ScheduleError: `stages` or `microbatches` is below 1.
    """
    rows = split_one_f_one_b(stages, microbatches, per_hop=1)
    return Schedule.from_computations(rows, range(stages), microbatches, "ZB-H1")
