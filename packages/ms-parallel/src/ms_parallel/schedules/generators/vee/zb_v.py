"""ZB-V: 1F1B's memory and no bubble, for equal times, on a V with two stages per rank (Qi 2023)."""

from ms_parallel.schedules.generators.registry import generator
from ms_parallel.schedules.generators.vee.phases import actions_of
from ms_parallel.schedules.table.placements import vee
from ms_parallel.schedules.table.schedule import Schedule


def _program(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Phases of the rank, in the notation of `phases`."""
    ranks_left = ranks - rank
    words = ["F0"] * (2 * ranks_left - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * ranks_left
    down, up = 2 * ranks - 1 - rank, ranks
    # Steady state: a round of both stages at a time, until every forward has run.
    while up < down or down < microbatches:
        if down < microbatches:
            words.append("F0")
            down += 1
        words += ["I0", "W0", "F1", "I1", "W1"]
        up += 1
    return words + ["I0", "I1"] * rank + ["I0", "W0"] * ranks_left


@generator("zb-v", placement=vee, seeds_search=True)
def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: handcrafted order for equal times of F, I and W and free messages.

    Every rank has up to `2 * ranks` live activations of its half-size stages, like 1F1B's first
    rank. With at least `2 * ranks - 1` microbatches no rank idles between its first and last
    action, and the makespan exceeds the work by (ranks - 1) * F of a half-size stage.

    Raises:
        ScheduleError: `ranks` or `microbatches` is below 1.
    """
    # `_program` needs that many microbatches; `actions_of` drops actions past the last.
    padded = max(microbatches, 2 * ranks - 1)
    rows = [
        actions_of(_program(rank, ranks, padded), (rank, 2 * ranks - 1 - rank), microbatches)
        for rank in range(ranks)
    ]
    return Schedule.from_computations(rows, vee(ranks), microbatches, "ZB-V")
