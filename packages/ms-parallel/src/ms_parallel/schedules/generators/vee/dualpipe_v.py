"""DualPipeV: forwards paired with backwards on a V (DeepSeek, "cut-in-half" DualPipe, 2025)."""

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.generators.registry import generator
from ms_parallel.schedules.generators.vee.phases import actions_of
from ms_parallel.schedules.table.placements import vee
from ms_parallel.schedules.table.schedule import Schedule


def _program(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Write the rank's phases, in words of `phases`."""
    last, after = rank == ranks - 1, ranks - 1 - rank
    words = ["F0"] * (2 * after) + ["F0", "F1"] * (rank + 1) + ["I1", "W", "F1"] * after
    steady = ["F0&B1", "F1&B0"] * (microbatches - 2 * ranks + rank + 1)
    if last:
        # The way down ends where the way up begins, so the first pair would wait for itself.
        steady[:1] = ["F0", "B1"]
    words += steady + ["B1", "F1&B0"] * after
    ending = ["B1", "B0"] * (rank + 1)
    # From the middle on, backwards are split so that the ranks drain without idling.
    split_from = 2 * ((rank + 1) // 2) + (0 if rank % 2 else 1)
    words += ending[:split_from] + [word.replace("B", "I") for word in ending[split_from:]]
    return words + ["W", "I0"] * after + ["W"] * (rank + 1)


@generator("dualpipe-v", placement=vee)
def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Place two stages a rank, as a V; in the steady state pair a forward with a backward.

    The paper overlaps the two of a pair, to hide one's messages behind the other's computations.
    Our runtime performs them one after the other, and `simulate` times them so: here the schedule
    has the paper's order and memory, but not that gain.

    Args:
        ranks: Ranks of the pipeline.
        microbatches: At least twice as many as ranks.

    Raises:
        ScheduleError: too few ranks or microbatches.
    """
    if ranks < 1 or microbatches < 2 * ranks:
        raise ScheduleError(
            f"DualPipeV on {ranks} ranks with {microbatches} microbatches; it needs at least "
            f"1 rank and twice as many microbatches as ranks ({max(2, 2 * ranks)})"
        )
    rows = [
        actions_of(_program(rank, ranks, microbatches), (rank, 2 * ranks - 1 - rank), microbatches)
        for rank in range(ranks)
    ]
    return Schedule.from_computations(rows, vee(ranks), microbatches, "DualPipeV")
