"""Checks what a table names beside its computations and messages: gathers, sums and waits."""

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import COMPUTE, WAITS, Action, Kind

_WEIGHTS = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})


def check_stage_actions(rank: int, row: tuple[Action, ...]) -> None:
    """Check that a stage is gathered before it computes, and its gradients are summed once, last.

    A stage that is never unsharded is gathered when it is due. One may stay gathered at the end of
    the row, as torch leaves it.

    Raises:
        ScheduleError: an action that is repeated or out of turn.
    """
    sharded = {action.stage for action in row if action.kind in (Kind.UNSHARD, Kind.RESHARD)}
    gathered: set[int] = set()
    reduced: set[int] = set()
    for index, action in enumerate(row):
        for part in action.flat:
            where = f"{part} (rank {rank}, action {index})"
            _check_turn(part, where, sharded, gathered)
            if part.kind is Kind.UNSHARD:
                gathered.add(part.stage)
            elif part.kind is Kind.RESHARD:
                gathered.remove(part.stage)
            elif part.kind is Kind.REDUCE_GRAD:
                if part.stage in reduced:
                    raise ScheduleError(f"{where} reduces gradients a second time; remove it")
                reduced.add(part.stage)
            elif part.kind in _WEIGHTS and part.stage in reduced:
                raise ScheduleError(
                    f"{where} adds to gradients that {part.stage}REDUCE_GRAD has already reduced; "
                    "move that one behind"
                )


def _check_turn(part: Action, where: str, sharded: set[int], gathered: set[int]) -> None:
    if part.kind is Kind.UNSHARD and part.stage in gathered:
        raise ScheduleError(f"{where} gathers weights that are gathered; remove it")
    if part.kind is Kind.RESHARD and part.stage not in gathered:
        raise ScheduleError(f"{where} lets weights go that are not gathered; unshard them first")
    if part.kind in COMPUTE and part.stage in sharded - gathered:
        raise ScheduleError(
            f"{where} works on weights that are not gathered; put {part.stage}UNSHARD before it"
        )


def check_waits(rank: int, row: tuple[Action, ...]) -> None:
    """Check that each wait stands behind what it waits for, once.

    Raises:
        ScheduleError: a wait that is repeated, or for what has not begun.
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
