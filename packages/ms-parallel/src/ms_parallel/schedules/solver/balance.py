"""Balances the segments of a model over stages by measured costs, jointly with the schedule.

Segments keep the order of the model, so a split is determined by its cuts; slower ranks get fewer
segments. The start is the split with the smallest largest stage, by dynamic programming. Then
single segments move between stages as long as the schedule that `search` finds gets shorter, as the
goal is the makespan with bubbles and messages rather than the largest stage.
"""

from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from numbers import Integral

from attrs import frozen

from ms_parallel.arguments import check_integer, check_items, check_number, check_type
from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.construction.portfolio import quick_arrangement
from ms_parallel.schedules.construction.problem import problem_of
from ms_parallel.schedules.solver.search import Found, search
from ms_parallel.schedules.table.costs import Number
from ms_parallel.schedules.table.placements import ranks_of
from ms_parallel.schedules.table.segments import SegmentCosts

_BUDGET = 2_000_000
"""Actions scheduled over all splits while segments move; about 6 s on one core."""
_ARRANGEMENTS = 7
"""Number of arrangements per split."""


@frozen(kw_only=True)
class Balanced:
    """Result of `balance`."""

    split: tuple[int, ...]
    """Number of segments of each stage."""
    found: Found
    """Schedule for this split; its lower bound is for this split only."""


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
    """Choose the number of segments of each stage, and the schedule.

    Args:
        segments: measured costs.
        memory_cap: activation memory limit of every rank, or one per rank; None for no limit.
        placement: rank of each stage.
        microbatches: microbatches per step.
        split: allow input and weight backwards to be separate.
        seed: seed of the search's random walks.
        effort: as in `search`, for the final search; intermediate splits cost far less.

    Raises:
        ScheduleError: there are fewer segments than stages, or a cap is too small.
    """
    check_type("segments", segments, SegmentCosts, "SegmentCosts", error=ScheduleError)
    check_items("placement", placement, Integral, "ranks of stages", error=ScheduleError)
    ranks_of(placement)
    check_integer("microbatches", microbatches, minimum=1, error=ScheduleError)
    check_number("effort", effort, minimum=0, error=ScheduleError)
    stages = len(placement)
    if segments.count < stages:
        raise ScheduleError(
            f"{segments.count} segments for {stages} stages; every stage needs at least one, so use"
            " fewer stages"
        )
    layer_split = _climb(segments, memory_cap, tuple(placement), microbatches, split)
    result = search(
        segments.stages(layer_split, placement),
        memory_cap,
        microbatches=microbatches,
        placement=placement,
        split=split,
        seed=seed,
        effort=effort,
    )
    return Balanced(split=layer_split, found=result)


def _climb(
    segments: SegmentCosts,
    memory_cap: Number | Sequence[Number] | None,
    placement: tuple[int, ...],
    microbatches: int,
    split_backwards: bool,
) -> tuple[int, ...]:
    """Hill climbing: make the best move of one segment until none shortens the schedule."""
    cost_of: dict[tuple[int, ...], Fraction | None] = {}

    def cost(candidate: tuple[int, ...]) -> Fraction | None:
        if candidate not in cost_of:
            cost_of[candidate] = None  # stays None if a stage does not fit under the cap
            with suppress(ScheduleError):
                costs = segments.stages(candidate, placement)
                problem = problem_of(costs, memory_cap, microbatches, placement, split_backwards)
                makespan = quick_arrangement(problem).makespan
                cost_of[candidate] = Fraction(makespan, problem.ticks.per_unit)
        return cost_of[candidate]

    split = split_by_work(segments, placement)
    best = cost(split)
    # A split costs `_ARRANGEMENTS` schedules of three actions per stage and microbatch.
    max_splits = _BUDGET // (_ARRANGEMENTS * 3 * len(placement) * microbatches)
    for _ in range(4 * len(placement)):
        if len(cost_of) > max_splits:
            break
        neighbors = [
            (time, neighbor)
            for neighbor in _neighbors(split, segments, placement)
            if (time := cost(neighbor)) is not None
        ]
        if not neighbors or (best is not None and min(neighbors)[0] >= best):
            break
        best, split = min(neighbors)
    return split


def split_by_work(segments: SegmentCosts, placement: Sequence[int]) -> tuple[int, ...]:
    """Minimize the largest stage by work; among equals, fill the first stages most.

    Args:
        segments: measured costs.
        placement: rank of each stage.
    """
    prefix = [Fraction(0)]
    for index in range(segments.count):
        prefix.append(prefix[-1] + segments.work(index))
    # worst[n]: smallest possible largest stage for the first n segments; cut[n]: start of the last.
    worst: list[Fraction | None] = [Fraction(0)] + [None] * segments.count
    cuts: list[list[int]] = []
    for slowness in segments.slowness_of(placement):
        next_worst: list[Fraction | None] = [None] * (segments.count + 1)
        cut = [0] * (segments.count + 1)
        for end in range(1, segments.count + 1):
            # From short to long last stages: only a strict improvement replaces a shorter one.
            for begin in range(end - 1, -1, -1):
                largest, stage_time = worst[begin], (prefix[end] - prefix[begin]) * slowness
                best_known = next_worst[end]
                # Longer last stages only take more time.
                if best_known is not None and stage_time > best_known:
                    break
                if largest is not None and (
                    best_known is None or max(largest, stage_time) < best_known
                ):
                    next_worst[end], cut[end] = max(largest, stage_time), begin
        worst = next_worst
        cuts.append(cut)
    split, end = [], segments.count
    # Read the split backwards from the cuts.
    for cut in reversed(cuts):
        split.append(end - cut[end])
        end = cut[end]
    return tuple(reversed(split))


def _neighbors(
    split: tuple[int, ...], segments: SegmentCosts, placement: Sequence[int]
) -> set[tuple[int, ...]]:
    """Splits with one segment moved to an adjacent stage, or from the busiest rank to any."""
    costs = segments.stages(split, placement)
    busy = [Fraction(0)] * ranks_of(placement)
    for stage, rank in enumerate(placement):
        busy[rank] += costs.forward[stage]
        busy[rank] += costs.backward_input[stage] + costs.backward_weight[stage]
    # The busiest rank may give a segment to any stage.
    busiest = [stage for stage, rank in enumerate(placement) if busy[rank] == max(busy)]
    stages = range(len(split))
    moves = {
        (source, target)
        for source in stages
        for target in (source - 1, source + 1)
        if target in stages
    }
    moves |= {(source, target) for source in busiest for target in stages if source != target}
    neighbors = set()
    for source, target in moves:
        if split[source] > 1:
            neighbor = list(split)
            neighbor[source] -= 1
            neighbor[target] += 1
            neighbors.add(tuple(neighbor))
    return neighbors
