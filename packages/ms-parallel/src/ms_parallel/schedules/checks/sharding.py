"""Checks a table's UNSHARD, RESHARD and REDUCE_GRAD, which frame the work on a sharded stage."""

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import COMPUTE, Action, Kind

__all__ = ["check_shards"]

_WEIGHTS = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})


def check_shards(rank: int, row: tuple[Action, ...]) -> None:
    """Each stage that has such actions is gathered before it works and let go only once between.

    A stage that is never unsharded is not sharded, and a stage may stay gathered at the end of the
    row, as torch leaves it.

    Raises:
        ScheduleError: An action that is repeated, out of turn, or at a stage that is let go.
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
