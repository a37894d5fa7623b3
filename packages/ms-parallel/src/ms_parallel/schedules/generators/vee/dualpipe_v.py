"""DualPipeV: forwards paired with backwards on a V (DeepSeek, "cut-in-half" DualPipe, 2025)."""

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.generators.registry import generator
from ms_parallel.schedules.generators.vee.phases import actions_of
from ms_parallel.schedules.table.placements import vee
from ms_parallel.schedules.table.schedule import Schedule


def _program(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Phases of the rank, in the notation of `phases`."""
    is_last, ranks_after = rank == ranks - 1, ranks - 1 - rank
    words = ["F0"] * (2 * ranks_after) + ["F0", "F1"] * (rank + 1) + ["I1", "W", "F1"] * ranks_after
    steady = ["F0&B1", "F1&B0"] * (microbatches - 2 * ranks + rank + 1)
    if is_last:
        # On the last rank both stages are adjacent, so its first pair would wait for itself.
        steady[:1] = ["F0", "B1"]
    words += steady + ["B1", "F1&B0"] * ranks_after
    ending = ["B1", "B0"] * (rank + 1)
    # From the middle of the ending on, backwards are split so that ranks drain without idling.
    split_from = 2 * ((rank + 1) // 2) + (0 if rank % 2 else 1)
    words += ending[:split_from] + [word.replace("B", "I") for word in ending[split_from:]]
    return words + ["W", "I0"] * ranks_after + ["W"] * (rank + 1)


@generator("dualpipe-v", placement=vee)
def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """V schedule that pairs a forward with a backward in the steady state.

    The paper overlaps the two computations of a pair, to hide the messages of one behind the other.
    Our runtime runs them one after the other, and `simulate` times them that way: the schedule has
    the paper's order and memory, but not this gain.

    Args:
        ranks: pipeline ranks, with two stages each.
        microbatches: at least twice the number of ranks.

    Raises:
        ScheduleError: too few ranks or microbatches.
    """
    if ranks < 1 or microbatches < 2 * ranks:
        raise ScheduleError(
            f"DualPipeV needs at least 1 rank and 2 microbatches per rank ({max(2, 2 * ranks)}),"
            f" got {ranks} ranks and {microbatches} microbatches; use more microbatches"
        )
    rows = [
        actions_of(_program(rank, ranks, microbatches), (rank, 2 * ranks - 1 - rank), microbatches)
        for rank in range(ranks)
    ]
    return Schedule.from_computations(rows, vee(ranks), microbatches, "DualPipeV")
