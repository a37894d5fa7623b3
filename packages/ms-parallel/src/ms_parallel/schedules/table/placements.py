"""Placements: the rank of each stage."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from numbers import Integral

from ms_parallel.arguments import check_integer, check_items
from ms_parallel.errors import ScheduleError


def integers(values: Iterable[int]) -> tuple[int, ...]:
    """Convert to a tuple of integers, as an attrs converter.

    Raises:
        ScheduleError: a value is not an integer.
    """
    check_items("placement", values, Integral, "ranks", error=ScheduleError)
    return tuple(values)


def one_a_rank(ranks: int) -> tuple[int, ...]:
    """Place stage s on rank s."""
    check_integer("ranks", ranks, minimum=0, error=ScheduleError)
    return tuple(range(ranks))


def looped(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Place stage s on rank s mod `ranks`; a microbatch goes around `stages_per_rank` times."""
    check_integer("ranks", ranks, minimum=0, error=ScheduleError)
    check_integer("stages_per_rank", stages_per_rank, minimum=1, error=ScheduleError)
    return tuple(range(ranks)) * stages_per_rank


def vee(ranks: int) -> tuple[int, ...]:
    """Place two stages per rank, down and back up: the first and last stage are on rank 0."""
    check_integer("ranks", ranks, minimum=0, error=ScheduleError)
    return (*range(ranks), *reversed(range(ranks)))


@lru_cache(maxsize=8)
def stages_by_rank(placement: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Stages of each rank, in ascending order."""
    return tuple(
        tuple(stage for stage, stage_rank in enumerate(placement) if stage_rank == rank)
        for rank in range(max(placement) + 1)
    )


def ranks_of(placement: Sequence[int]) -> int:
    """Number of ranks of a placement.

    Raises:
        ScheduleError: a rank has no stage.
    """
    ranks = max(placement, default=-1) + 1
    if not ranks or set(placement) != set(range(ranks)):
        raise ScheduleError(
            f"placement {tuple(placement)} leaves some of its {ranks} ranks unused; every rank "
            "needs a stage"
        )
    return ranks
