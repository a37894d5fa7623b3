"""Checks the actions on stages: gathering weights, reducing gradients, and waits."""

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import COMPUTE, WAITS, Action, Kind

_WEIGHTS = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})


def check_stage_actions(rank: int, row: tuple[Action, ...]) -> None:
    """Check that weights are gathered before computations, and gradients reduced once, at the end.

    A stage without UNSHARD is gathered when needed. A stage may stay gathered at the end of the
    row, as in torch's tables.

    Raises:
        ScheduleError: an action is repeated or in the wrong place.
    """
    # Stages without UNSHARD and RESHARD are gathered implicitly.
    sharded = {action.stage for action in row if action.kind in (Kind.UNSHARD, Kind.RESHARD)}
    gathered: set[int] = set()
    reduced: set[int] = set()
    for index, action in enumerate(row):
        for part in action.flat:
            context = f"{part} (rank {rank}, action {index})"
            _check_turn(part, context, sharded, gathered)
            if part.kind is Kind.UNSHARD:
                gathered.add(part.stage)
            elif part.kind is Kind.RESHARD:
                gathered.remove(part.stage)
            elif part.kind is Kind.REDUCE_GRAD:
                if part.stage in reduced:
                    raise ScheduleError(f"{context} reduces gradients a second time; remove it")
                reduced.add(part.stage)
            elif part.kind in _WEIGHTS and part.stage in reduced:
                raise ScheduleError(
                    f"{context} adds to gradients that {part.stage}REDUCE_GRAD has already reduced;"
                    " move REDUCE_GRAD after it"
                )


def _check_turn(part: Action, context: str, sharded: set[int], gathered: set[int]) -> None:
    if part.kind is Kind.UNSHARD and part.stage in gathered:
        raise ScheduleError(f"{context} gathers weights that are already gathered; remove it")
    if part.kind is Kind.RESHARD and part.stage not in gathered:
        raise ScheduleError(f"{context} frees weights that are not gathered; unshard them first")
    if part.kind in COMPUTE and part.stage in sharded - gathered:
        raise ScheduleError(
            f"{context} uses weights that are not gathered; put {part.stage}UNSHARD before it"
        )


def check_waits(rank: int, row: tuple[Action, ...]) -> None:
    """Check that each wait comes once, after the action it waits for.

    Raises:
        ScheduleError: a wait is repeated, or its action does not come before it.
    """
    seen: set[Action] = set()
    for index, action in enumerate(row):
        if action.kind in WAITS:
            awaited = action._replace(kind=WAITS[action.kind])
            context = f"{action} (rank {rank}, action {index})"
            if action in seen:
                raise ScheduleError(f"{context} waits a second time; remove it")
            if awaited not in seen:
                raise ScheduleError(
                    f"{context} waits for {awaited}, which does not come before it; move it after"
                    f" {awaited}"
                )
        seen.add(action)
