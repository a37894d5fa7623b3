"""Candidate policies for the list scheduler: building blocks with many delays, kept or followed.

The delays decide how much memory a block holds, how long the pipeline takes to fill, and how late
a message may come without harm. No single choice is best for all costs and caps, so many are tried:
first on few microbatches and, of a long pipeline, on a coarse model of it; then the best in full.
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
"""Fewest and most blocks tried on the small model."""


@frozen
class Recipe:
    """How to draw a block and what to do with it; the same for a pipeline of any length."""

    stretch: int
    """Interval in percent of the longest work, or 0 for a block of unit times."""
    delays: tuple[int, ...]
    """Delay of each leg, in halves of an average pass."""

    def draw(self, problem: Problem) -> BuildingBlock | None:
        """Draw the block; return None if it cannot be drawn or held."""
        ticks, work = problem.ticks, problem.longest_work
        block: BuildingBlock | None
        if self.stretch:
            half_slot = work // (3 * len(self.delays))
            delays = [delay * half_slot for delay in self.delays]
            interval = work * self.stretch // 100
            block = building_block(problem.placement, ticks, interval, delays)
        else:
            block = unit_block(problem.placement, [delay // 2 for delay in self.delays])
        return block if block is not None and _fits(problem, block) else None


def recipes(problem: Problem) -> list[Recipe]:
    """List all recipes that are worth a try, without looking at the caps."""
    legs = 2 * (len(problem.placement) // problem.ranks)
    ticks = problem.ticks
    unit = _delays(legs, {2: range(0, 18, 2), 4: range(0, 10, 2)}.get(legs, range(0, 6, 2)))
    drawn = [Recipe(0, delays) for delays in unit]
    times = set(ticks.forward + ticks.backward_input + ticks.backward_weight)
    if len(times) > 1 or ticks.latency or any(ticks.transfer):
        real = _delays(legs, [0, 1, 2, 4])
        drawn += [Recipe(stretch, d) for stretch in (100, 103, 107, 115, 125, 150) for d in real]
    return drawn


def _fits(problem: Problem, block: BuildingBlock) -> bool:
    held = block.held(problem.ticks.activation)
    return all(need <= cap for need, cap in zip(held, problem.caps, strict=True))


def _delays(legs: int, choices: Sequence[int]) -> list[tuple[int, ...]]:
    """List every choice of delays for up to four legs; beyond, one delay for each direction."""
    if legs <= 4:
        return list(product(choices, repeat=legs))
    half = legs // 2
    return [(a,) * half + (b,) * half for a, b in product(choices, repeat=2)]


def _eager(problem: Problem) -> ListPolicy:
    """Make the policy that prefers backwards, and early stages' forwards to those of late ones."""
    stages = problem.ticks.stages
    return ListPolicy(period=1, forward=tuple(range(stages)), backward=(-1,) * stages)


def glance(problem: Problem) -> Arrangement:
    """Find the shortest of a handful of arrangements: a cheap judgement of costs, not of order.

    Raises:
        ScheduleError: a cap is below what one microbatch needs.
    """
    found = [arrange(problem, _eager(problem))]
    legs = 2 * (problem.ticks.stages // problem.ranks)
    for delay in range(3):
        block = Recipe(0, (2 * delay,) * legs).draw(problem)
        if block is not None:
            found.append(arrange(problem, follow(problem, block)))
            with suppress(ScheduleError):
                kept = keep_order(problem, block.order(problem.microbatches))
                found.append(arrange(problem, kept))
    return min(found, key=lambda arrangement: arrangement.makespan)


def best(problem: Problem, budget: int) -> Arrangement:
    """Find the shortest of as many arrangements as `budget` actions allow, of all together.

    The small model's are not counted: they do not grow with the problem.

    Raises:
        ScheduleError: a cap is below what one microbatch needs.
    """
    found = arrange(problem, _eager(problem))
    finalists = max(2, min(24, budget // (4 * problem.actions)))
    overruns = (0, max(problem.ticks.backward_weight) // 3)[: 1 if finalists < 4 else 2]
    for recipe, strict in _shortlist(
        problem, min(max(budget // 1000, _BLOCKS[0]), _BLOCKS[1]), finalists
    ):
        block = recipe.draw(problem)
        if block is None:
            continue
        policy = follow(problem, block)
        if strict:
            policy = keep_order(problem, block.order(problem.microbatches))
        for overrun in overruns:
            with suppress(ScheduleError):
                tried = evolve(policy, weight_overrun=overrun)
                found = arrange(problem, tried, limit=found.makespan)
    return found


def _shortlist(problem: Problem, tries: int, count: int) -> list[tuple[Recipe, bool]]:
    """List the best recipes on a small model, and whether to keep their order or follow times."""
    small = _coarse(problem)
    small = evolve(small, microbatches=min(problem.microbatches, 2 * small.ranks + 2))
    drawn: dict[int, tuple[Recipe, BuildingBlock]] = {}
    for recipe, block, pattern in _drawings(
        evolve(small, caps=_NO_LIMIT * small.ranks), tuple(recipes(problem))
    ):
        if _fits(small, block):
            drawn.setdefault(pattern, (recipe, block))
    scored = []
    for place, (recipe, block) in enumerate(_spread(list(drawn.values()), tries)):
        kept = keep_order(small, block.order(small.microbatches))
        for strict, policy in ((True, kept), (False, follow(small, block))):
            with suppress(ScheduleError):
                scored.append((arrange(small, policy).makespan, place, strict, recipe))
    scored.sort(key=lambda item: item[:3])
    return [(recipe, strict) for _, _, strict, recipe in scored[:count]]


@lru_cache(maxsize=2)
def _drawings(
    problem: Problem, wanted: tuple[Recipe, ...]
) -> list[tuple[Recipe, BuildingBlock, int]]:
    """Draw each recipe that can be drawn, and number its order: the same under any caps."""
    numbers: dict[Order, int] = {}
    drawn = []
    for recipe in wanted:
        block = recipe.draw(problem)
        if block is not None:
            drawn.append((recipe, block, numbers.setdefault(block.order(2), len(numbers))))
    return drawn


def _coarse(problem: Problem) -> Problem:
    """Shrink a long pipeline to fewer ranks: every so-many-th of its ranks stands for all."""
    if problem.ranks <= _COARSE_RANKS:
        return problem
    loops = len(problem.placement) // problem.ranks
    ranks, few = problem.ranks, _COARSE_RANKS
    if problem.placement == vee(ranks):
        placement = vee(few)
    elif problem.placement == looped(ranks, loops):
        placement = looped(few, loops)
    else:
        return problem
    near = [rank * ranks // few for rank in range(few)]
    homes, coarse = stages_by_rank(problem.placement), stages_by_rank(placement)
    chosen = [homes[near[rank]][coarse[rank].index(stage)] for stage, rank in enumerate(placement)]

    def pick(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[stage] for stage in chosen)

    return evolve(
        problem,
        ticks=problem.ticks.changed(pick, (*Ticks.TIMES, *Ticks.MEMORY)),
        placement=placement,
        caps=[_scaled_cap(problem, rank) for rank in near],
    )


def _scaled_cap(problem: Problem, rank: int) -> int:
    """Shrink a cap's memory beyond the least that works with the number of ranks."""
    least = problem.least(rank)
    return least + (problem.caps[rank] - least) * _COARSE_RANKS // problem.ranks


def _spread(
    ordered: list[tuple[Recipe, BuildingBlock]], count: int
) -> list[tuple[Recipe, BuildingBlock]]:
    """Choose at most `count` items, evenly spread over the list."""
    if len(ordered) <= count:
        return ordered
    return [ordered[index * len(ordered) // count] for index in range(count)]
