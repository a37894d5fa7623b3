"""Interleaved 1F1B: each rank holds several stages and takes them in turn (Narayanan 2021)."""

from itertools import pairwise

from ms_parallel.schedules.generators.registry import generator
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.placements import looped
from ms_parallel.schedules.table.schedule import Schedule


@generator("interleaved-1f1b", placement=looped, begins_search=True)
def interleaved_one_f_one_b(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Run 1F1B in `stages_per_rank` rounds: the bubble shrinks and messages grow by that factor.

    Bubble: (ranks - 1) * (F + B) for F and B of one of the smaller stages, if `ranks` divides
    `microbatches`. Where it does not, microbatches are dealt evenly to groups of at least
    `ranks`, rather than leaving a small group at the end, which could deadlock.

    Raises:
        ScheduleError: an argument is below 1.
    """
    placement = looped(ranks, stages_per_rank)
    groups = max(1, microbatches // max(ranks, 1))
    bounds = [microbatches * group // groups for group in range(groups + 1)]
    largest = max(after - before for before, after in pairwise(bounds))
    rows = []
    for rank in range(ranks):
        stages = [rank + ranks * turn for turn in range(stages_per_rank)]
        forwards, backwards = (
            [
                Action(kind, stage, microbatch)
                for before, after in pairwise(bounds)
                for stage in order
                for microbatch in range(before, after)
            ]
            for kind, order in ((Kind.FORWARD, stages), (Kind.BACKWARD, stages[::-1]))
        )
        ahead = (stages_per_rank - 1) * largest + 2 * (ranks - 1 - rank)
        if stages_per_rank == 1:
            ahead = ranks - 1 - rank
        row = forwards[:ahead]
        for index, backward in enumerate(backwards):
            row += [*forwards[ahead + index : ahead + index + 1], backward]
        rows.append(row)
    return Schedule.from_computations(rows, placement, microbatches, "interleaved 1F1B")
