"""How many segments of a model each stage gets, from measured costs, jointly with the schedule.

Segments stay in the order of the model, so a split is its cuts; ranks that are slower than others
get fewer of them. It begins with the best split of
the work alone, by dynamic programming; then one segment at a time moves from stage to stage while
the schedule that `search` makes gets shorter, because what counts is the makespan with its bubbles
and messages, not the largest stage.
"""

from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction

from attrs import frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.construction.portfolio import glance
from ms_parallel.schedules.construction.problem import problem_of
from ms_parallel.schedules.solver.search import Found, search
from ms_parallel.schedules.table.costs import Number
from ms_parallel.schedules.table.placements import ranks_of
from ms_parallel.schedules.table.segments import SegmentCosts

_BUDGET = 2_000_000
"""Actions scheduled while segments move, over all splits; some 6 s on one core."""
_GLANCES = 7
"""Arrangements of one split."""


@frozen(kw_only=True)
class Balanced:
    """The split that `balance` chose."""

    split: tuple[int, ...]
    """Segments of each stage."""
    found: Found
    """The schedule for it, with its bound; the bound holds for this split."""


def balance(
    segments: SegmentCosts,
    memory_cap: Number | Sequence[Number] | None = None,
    *,
    placement: Sequence[int],
    microbatches: int,
    split: bool = True,
    seed: int = 0,
    effort: float = 1.0,
) -> Balanced:
    """Choose how many segments each stage gets, and the schedule.

    Args:
        segments: Measured costs.
        memory_cap: Most activation memory of a rank, or of each; None for no limit.
        placement: Rank of each stage.
        microbatches: Of one step.
        split: Whether backwards of inputs and of weights may be apart.
        seed: Of the search's random walks.
        effort: As in `search`, for the last search; each split on the way costs far less.

    Raises:
        ScheduleError: fewer segments than stages, or a cap below the least that works.
    """
    stages = len(placement)
    if segments.count < stages:
        raise ScheduleError(
            f"{segments.count} segments for {stages} stages; every stage needs at least one, "
            "so choose fewer stages"
        )
    chosen = _climb(segments, memory_cap, tuple(placement), microbatches, split)
    found = search(
        segments.stages(chosen, placement),
        memory_cap,
        microbatches=microbatches,
        placement=placement,
        split=split,
        seed=seed,
        effort=effort,
    )
    return Balanced(split=chosen, found=found)


def _climb(
    segments: SegmentCosts,
    memory_cap: Number | Sequence[Number] | None,
    placement: tuple[int, ...],
    microbatches: int,
    split_backwards: bool,
) -> tuple[int, ...]:
    """Move one segment at a time, always the best move, until none makes the schedule shorter."""
    tried: dict[tuple[int, ...], Fraction | None] = {}

    def cost(candidate: tuple[int, ...]) -> Fraction | None:
        if candidate not in tried:
            tried[candidate] = None
            with suppress(ScheduleError):
                costs = segments.stages(candidate, placement)
                problem = problem_of(costs, memory_cap, microbatches, placement, split_backwards)
                makespan = glance(problem).makespan
                tried[candidate] = Fraction(makespan, problem.ticks.per_unit)
        return tried[candidate]

    split = split_by_work(segments, placement)
    best = cost(split)
    most = _BUDGET // (_GLANCES * 3 * len(placement) * microbatches)
    for _ in range(4 * len(placement)):
        if len(tried) > most:
            break
        rivals = [
            (time, rival)
            for rival in _neighbours(split, segments, placement)
            if (time := cost(rival)) is not None
        ]
        if not rivals or (best is not None and min(rivals)[0] >= best):
            break
        best, split = min(rivals)
    return split


def split_by_work(segments: SegmentCosts, placement: Sequence[int]) -> tuple[int, ...]:
    """Find the split of least largest stage; of several the one that fills the first stages most.

    Args:
        segments: Measured costs.
        placement: Rank of each stage.
    """
    before = [Fraction(0)]
    for index in range(segments.count):
        before.append(before[-1] + segments.work(index))
    # worst[n]: least largest stage when the first n segments have the stages so far; cut[n]: where.
    worst: list[Fraction | None] = [Fraction(0)] + [None] * segments.count
    cuts: list[list[int]] = []
    for slow in segments.slowness_of(placement):
        new: list[Fraction | None] = [None] * (segments.count + 1)
        cut = [0] * (segments.count + 1)
        for end in range(1, segments.count + 1):
            for begin in range(end - 1, -1, -1):
                largest, last = worst[begin], (before[end] - before[begin]) * slow
                known = new[end]
                if known is not None and last > known:
                    break
                if largest is not None and (known is None or max(largest, last) < known):
                    new[end], cut[end] = max(largest, last), begin
        worst = new
        cuts.append(cut)
    split, end = [], segments.count
    for cut in reversed(cuts):
        split.append(end - cut[end])
        end = cut[end]
    return tuple(reversed(split))


def _neighbours(
    split: tuple[int, ...], segments: SegmentCosts, placement: Sequence[int]
) -> set[tuple[int, ...]]:
    """List splits with one segment moved: over a cut, or from the busiest rank to any stage."""
    costs = segments.stages(split, placement)
    busy = [Fraction(0)] * ranks_of(placement)
    for stage, rank in enumerate(placement):
        busy[rank] += costs.forward[stage]
        busy[rank] += costs.backward_input[stage] + costs.backward_weight[stage]
    full = [stage for stage, rank in enumerate(placement) if busy[rank] == max(busy)]
    stages = range(len(split))
    moves = {(one, two) for one in stages for two in (one - 1, one + 1) if two in stages}
    moves |= {(one, two) for one in full for two in stages if one != two}
    rivals = set()
    for giver, taker in moves:
        if split[giver] > 1:
            rival = list(split)
            rival[giver] -= 1
            rival[taker] += 1
            rivals.add(tuple(rival))
    return rivals
