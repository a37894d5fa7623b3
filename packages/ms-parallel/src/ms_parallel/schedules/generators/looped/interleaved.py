"""Interleaved 1F1B: each rank alternates between several stages (Narayanan 2021)."""

from itertools import pairwise

from ms_parallel.schedules.generators.registry import generator
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.placements import looped
from ms_parallel.schedules.table.schedule import Schedule


@generator("interleaved-1f1b", placement=looped, seeds_search=True)
def interleaved_one_f_one_b(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """1F1B in `stages_per_rank` rounds: divides the bubble and multiplies messages by that factor.

    Bubble: (ranks - 1) * (F + B), with F and B of a single (smaller) stage, if `ranks` divides
    `microbatches`. If not, microbatches are distributed evenly over groups of at least `ranks`; a
    small group at the end could deadlock.

    Raises:
        ScheduleError: an argument is below 1.
    """
    placement = looped(ranks, stages_per_rank)
    groups = max(1, microbatches // max(ranks, 1))
    bounds = [microbatches * group // groups for group in range(groups + 1)]
    largest = max(stop - start for start, stop in pairwise(bounds))
    rows = []
    for rank in range(ranks):
        stages = [rank + ranks * index for index in range(stages_per_rank)]
        forwards, backwards = (
            [
                Action(kind, stage, microbatch)
                for start, stop in pairwise(bounds)
                for stage in order
                for microbatch in range(start, stop)
            ]
            for kind, order in ((Kind.FORWARD, stages), (Kind.BACKWARD, stages[::-1]))
        )
        # Forwards before the first backward: all but the last round, plus 1F1B's warm-up.
        ahead = (stages_per_rank - 1) * largest + 2 * (ranks - 1 - rank)
        if stages_per_rank == 1:
            ahead = ranks - 1 - rank
        row = forwards[:ahead]
        for index, backward in enumerate(backwards):
            row += [*forwards[ahead + index : ahead + index + 1], backward]
        rows.append(row)
    return Schedule.from_computations(rows, placement, microbatches, "interleaved 1F1B")
