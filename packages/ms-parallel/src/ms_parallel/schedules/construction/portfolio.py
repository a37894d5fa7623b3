"""Candidate policies for the list scheduler: building blocks with many delays.

The delays determine a block's memory, how long the pipeline takes to fill, and how late a message
may arrive without effect. No choice is best for all costs and caps. Many are tried with few
microbatches and, for a long pipeline, on a coarse model; the best are then scheduled in full.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import product

from attrs import evolve, frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.construction.building_block import (
    BuildingBlock,
    Order,
    building_block,
    unit_block,
)
from ms_parallel.schedules.construction.list_scheduler import arrange
from ms_parallel.schedules.construction.policies import follow, keep_order
from ms_parallel.schedules.construction.problem import Arrangement, ListPolicy, Problem
from ms_parallel.schedules.table.costs import Ticks
from ms_parallel.schedules.table.placements import looped, stages_by_rank, vee

_COARSE_RANKS = 8
_NO_LIMIT = (1 << 200,)
_BLOCKS = (40, 450)
"""Minimum and maximum number of blocks tried on the small model."""


@frozen
class Recipe:
    """Parameters of a building block, independent of the length of the pipeline."""

    stretch: int
    """Interval as a percentage of the longest work; 0 for a block with unit times."""
    delays: tuple[int, ...]
    """Delay of each leg, in halves of an average pass."""

    def draw(self, problem: Problem) -> BuildingBlock | None:
        """Build the block; None if it does not exist or exceeds the memory caps."""
        ticks, work = problem.ticks, problem.longest_work
        block: BuildingBlock | None
        if self.stretch:
            # Half an average pass: a rank has three passes and two legs per stage.
            half_slot = work // (3 * len(self.delays))
            delays = [delay * half_slot for delay in self.delays]
            interval = work * self.stretch // 100
            block = building_block(problem.placement, ticks, interval, delays)
        else:
            block = unit_block(problem.placement, [delay // 2 for delay in self.delays])
        return block if block is not None and _fits(problem, block) else None


def recipes(problem: Problem) -> list[Recipe]:
    """List all recipes to try, regardless of the caps."""
    legs = 2 * (len(problem.placement) // problem.ranks)
    ticks = problem.ticks
    # Unit-time blocks need whole passes as delays, so half passes come in twos.
    unit = _delays(legs, {2: range(0, 18, 2), 4: range(0, 10, 2)}.get(legs, range(0, 6, 2)))
    candidates = [Recipe(0, delays) for delays in unit]
    # With equal times and free messages, blocks in real time would repeat the unit-time blocks.
    times = set(ticks.forward + ticks.backward_input + ticks.backward_weight)
    if len(times) > 1 or ticks.latency or any(ticks.transfer):
        real = _delays(legs, [0, 1, 2, 4])
        candidates += [
            Recipe(stretch, d) for stretch in (100, 103, 107, 115, 125, 150) for d in real
        ]
    return candidates


def _fits(problem: Problem, block: BuildingBlock) -> bool:
    peaks = block.peak_memory(problem.ticks.activation)
    return all(need <= cap for need, cap in zip(peaks, problem.caps, strict=True))


def _delays(legs: int, choices: Sequence[int]) -> list[tuple[int, ...]]:
    """All combinations of delays for up to four legs; beyond that, one delay per direction."""
    if legs <= 4:
        return list(product(choices, repeat=legs))
    half = legs // 2
    return [(a,) * half + (b,) * half for a, b in product(choices, repeat=2)]


def _eager(problem: Problem) -> ListPolicy:
    """Policy that prefers backwards over forwards, and forwards of earlier stages over later."""
    stages = problem.ticks.stages
    return ListPolicy(period=1, forward=tuple(range(stages)), backward=(-1,) * stages)


def quick_arrangement(problem: Problem) -> Arrangement:
    """Return the shortest of a few arrangements: a cheap estimate for comparing splits of a model.

    Raises:
        ScheduleError: a memory cap is too small for one microbatch.
    """
    arrangements = [arrange(problem, _eager(problem))]
    legs = 2 * (problem.ticks.stages // problem.ranks)
    for delay in range(3):
        block = Recipe(0, (2 * delay,) * legs).draw(problem)
        if block is not None:
            arrangements.append(arrange(problem, follow(problem, block)))
            with suppress(ScheduleError):
                ordered = keep_order(problem, block.order(problem.microbatches))
                arrangements.append(arrange(problem, ordered))
    return min(arrangements, key=lambda arrangement: arrangement.makespan)


def best(problem: Problem, budget: int) -> Arrangement:
    """Return the shortest arrangement within a budget of scheduled actions.

    Arrangements of the small model do not count, as their size does not grow with the problem.

    Raises:
        ScheduleError: a memory cap is too small for one microbatch.
    """
    shortest = arrange(problem, _eager(problem))
    finalists = max(2, min(24, budget // (4 * problem.actions)))
    # Each finalist is scheduled once per overrun.
    overruns = (0, max(problem.ticks.backward_weight) // 3)[: 1 if finalists < 4 else 2]
    for recipe, keep in _shortlist(
        problem, min(max(budget // 1000, _BLOCKS[0]), _BLOCKS[1]), finalists
    ):
        block = recipe.draw(problem)
        if block is None:
            continue
        policy = follow(problem, block)
        if keep:
            policy = keep_order(problem, block.order(problem.microbatches))
        for overrun in overruns:
            with suppress(ScheduleError):
                # Raises as soon as it cannot beat the shortest arrangement so far.
                variant = evolve(policy, weight_overrun=overrun)
                shortest = arrange(problem, variant, limit=shortest.makespan)
    return shortest


def _shortlist(problem: Problem, count_blocks: int, count: int) -> list[tuple[Recipe, bool]]:
    """Best recipes on a small model, each with whether to keep its order or follow its times."""
    small = _coarse(problem)
    small = evolve(small, microbatches=min(problem.microbatches, 2 * small.ranks + 2))
    by_pattern: dict[int, tuple[Recipe, BuildingBlock]] = {}
    for recipe, block, pattern in _drawings(
        evolve(small, caps=_NO_LIMIT * small.ranks), tuple(recipes(problem))
    ):
        if _fits(small, block):
            # Recipes with the same order on the small model would give the same schedules.
            by_pattern.setdefault(pattern, (recipe, block))
    scored = []
    for index, (recipe, block) in enumerate(_spread(list(by_pattern.values()), count_blocks)):
        ordered = keep_order(small, block.order(small.microbatches))
        for keep, policy in ((True, ordered), (False, follow(small, block))):
            with suppress(ScheduleError):
                scored.append((arrange(small, policy).makespan, index, keep, recipe))
    # The index breaks ties, as recipes cannot be compared.
    scored.sort(key=lambda item: item[:3])
    return [(recipe, keep) for _, _, keep, recipe in scored[:count]]


@lru_cache(maxsize=2)
def _drawings(
    problem: Problem, recipes: tuple[Recipe, ...]
) -> list[tuple[Recipe, BuildingBlock, int]]:
    """Build the block of each recipe and number its order; the result is the same for all caps."""
    numbers: dict[Order, int] = {}
    blocks = []
    for recipe in recipes:
        block = recipe.draw(problem)
        if block is not None:
            blocks.append((recipe, block, numbers.setdefault(block.order(2), len(numbers))))
    return blocks


def _coarse(problem: Problem) -> Problem:
    """Shrink a long pipeline by sampling its ranks."""
    if problem.ranks <= _COARSE_RANKS:
        return problem
    loops = len(problem.placement) // problem.ranks
    ranks, coarse_ranks = problem.ranks, _COARSE_RANKS
    # Only the regular placements have a shorter version.
    if problem.placement == vee(ranks):
        placement = vee(coarse_ranks)
    elif problem.placement == looped(ranks, loops):
        placement = looped(coarse_ranks, loops)
    else:
        return problem
    # Evenly spaced ranks keep their costs and caps.
    sampled = [rank * ranks // coarse_ranks for rank in range(coarse_ranks)]
    stages, coarse_stages = stages_by_rank(problem.placement), stages_by_rank(placement)
    sampled_stages = [
        stages[sampled[rank]][coarse_stages[rank].index(stage)]
        for stage, rank in enumerate(placement)
    ]

    def pick(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[stage] for stage in sampled_stages)

    return evolve(
        problem,
        ticks=problem.ticks.changed(pick, (*Ticks.TIMES, *Ticks.MEMORY)),
        placement=placement,
        caps=[_scaled_cap(problem, rank) for rank in sampled],
    )


def _scaled_cap(problem: Problem, rank: int) -> int:
    """Scale the memory of a cap above its minimum with the number of ranks."""
    minimum = problem.min_memory(rank)
    return minimum + (problem.caps[rank] - minimum) * _COARSE_RANKS // problem.ranks


def _spread(
    ordered: list[tuple[Recipe, BuildingBlock]], count: int
) -> list[tuple[Recipe, BuildingBlock]]:
    """Pick at most `count` items, evenly spread over the list."""
    if len(ordered) <= count:
        return ordered
    return [ordered[index * len(ordered) // count] for index in range(count)]
