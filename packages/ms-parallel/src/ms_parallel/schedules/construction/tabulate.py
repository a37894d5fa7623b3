"""Converts rows of operations to a table with communication."""

from collections.abc import Sequence

from ms_parallel.schedules.construction.problem import Operation, Problem, Rows
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.schedule import Schedule

_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def tabulate(problem: Problem, rows: Rows, name: str) -> Schedule:
    """Build a schedule from rows that solve `problem`, and insert sends and receives."""
    return Schedule.from_computations(
        [_actions(row, problem.split) for row in rows],
        problem.placement,
        problem.microbatches,
        name,
        problem.ticks,
    )


def _actions(row: Sequence[Operation], split: bool) -> list[Action]:
    """Convert operations to actions; I directly followed by W on stage 0 becomes B."""
    if not split:
        kinds = (Kind.FORWARD, Kind.BACKWARD)
        return [Action(kinds[phase], stage, number) for phase, stage, number in row if phase < 2]
    fused: list[Action] = []
    for phase, stage, number in row:
        # Stage 0 sends no gradient, so an unsplit backward there delays nobody.
        if phase == 2 and stage == 0 and fused[-1] == (Kind.BACKWARD_INPUT, 0, number, ()):
            fused[-1] = Action(Kind.BACKWARD, 0, number)
        else:
            fused.append(Action(_KINDS[phase], stage, number))
    return fused
