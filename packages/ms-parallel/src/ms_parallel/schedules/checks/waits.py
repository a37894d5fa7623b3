"""Checks a table's waits for sends and for reductions of gradients, where it names them."""

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import WAITS, Action

__all__ = ["check_waits"]


def check_waits(rank: int, row: tuple[Action, ...]) -> None:
    """Each wait stands behind what it waits for, once. A table that names none waits at the end.

    Raises:
        ScheduleError: A wait that is repeated, or for what has not begun.
    """
    seen: set[Action] = set()
    for index, action in enumerate(row):
        if action.kind in WAITS:
            awaited = action._replace(kind=WAITS[action.kind])
            where = f"{action} (rank {rank}, action {index})"
            if action in seen:
                raise ScheduleError(f"{where} waits a second time; remove it")
            if awaited not in seen:
                raise ScheduleError(
                    f"{where} waits for {awaited}, which does not stand before it; move it behind"
                )
        seen.add(action)
