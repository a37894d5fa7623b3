"""Which rank each stage lives on."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from ms_parallel.errors import ScheduleError


def integers(values: Iterable[int]) -> tuple[int, ...]:
    """Make a tuple of integers: the converter of fields such as a placement."""
    return tuple(values)


def one_a_rank(ranks: int) -> tuple[int, ...]:
    """Place stage s on rank s."""
    return tuple(range(ranks))


def looped(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Place stage s on rank s mod `ranks`: a microbatch goes round `stages_per_rank` times."""
    if stages_per_rank < 1:
        raise ScheduleError(f"{stages_per_rank} stages a rank; give at least 1")
    return tuple(range(ranks)) * stages_per_rank


def vee(ranks: int) -> tuple[int, ...]:
    """Place two stages a rank, down and back up: the first and the last stage share rank 0."""
    return (*range(ranks), *reversed(range(ranks)))


@lru_cache(maxsize=8)
def stages_by_rank(placement: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """List the stages of each rank, ascending."""
    return tuple(
        tuple(stage for stage, home in enumerate(placement) if home == rank)
        for rank in range(max(placement) + 1)
    )


def ranks_of(placement: Sequence[int]) -> int:
    """Count the ranks that a placement uses.

    Raises:
        ScheduleError: a rank has no stage.
    """
    ranks = max(placement, default=-1) + 1
    if not ranks or set(placement) != set(range(ranks)):
        raise ScheduleError(
            f"placement {tuple(placement)} does not use each of its {ranks} ranks; every rank "
            "needs a stage"
        )
    return ranks
