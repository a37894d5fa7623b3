"""Turns rows of operations into a table with communication."""

from collections.abc import Sequence

from ms_parallel.schedules.construction.problem import Operation, Problem, Rows
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.schedule import Schedule

_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def tabulate(problem: Problem, rows: Rows, name: str) -> Schedule:
    """Make a schedule of rows that solve `problem`; sends and receives are inserted."""
    return Schedule.from_computations(
        [_actions(row, problem.split) for row in rows],
        problem.placement,
        problem.microbatches,
        name,
        problem.ticks,
    )


def _actions(row: Sequence[Operation], split: bool) -> list[Action]:
    """Make actions with whole backwards, or join I and W to a B where no rank waits for the I."""
    if not split:
        kinds = (Kind.FORWARD, Kind.BACKWARD)
        return [Action(kinds[kind], stage, number) for kind, stage, number in row if kind < 2]
    fused: list[Action] = []
    for kind, stage, number in row:
        if kind == 2 and stage == 0 and fused[-1] == (Kind.BACKWARD_INPUT, 0, number, ()):
            fused[-1] = Action(Kind.BACKWARD, 0, number)
        else:
            fused.append(Action(_KINDS[kind], stage, number))
    return fused
