"""Candidate policies for the list scheduler: building blocks with many delays, kept or followed.

The delays decide how much memory a block holds, how long the pipeline takes to fill, and how late
a message may come without harm. No single choice is best for all costs and caps, so many are tried.
"""

from collections.abc import Sequence
from itertools import product

from attrs import evolve

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.arrange import Arrangement, Policy, Problem, arrange
from ms_parallel.schedules.building_block import (
    Block,
    Order,
    building_block,
    unit_block,
)

__all__ = ["best", "blocks", "follow", "keep"]


def blocks(problem: Problem) -> list[Block]:
    """Every distinct block of short delays that the caps can hold, quickest first.

    Blocks on a grid of unit times ignore what differs between stages but pack tightly; those in
    real times need an interval a little longer than the work, so that unequal pieces fit.
    """
    work = problem.longest_work
    legs = 2 * (len(problem.placement) // problem.ranks)
    drawn: list[Block | None] = [
        unit_block(problem.placement, delays)
        for delays in _delays(legs, {2: range(9), 4: range(5)}.get(legs, range(3)))
    ]
    ticks = problem.ticks
    if len(set(ticks.forward + ticks.backward_input + ticks.backward_weight)) > 1 or ticks.latency:
        slot = work * 2 // (3 * legs)
        drawn += [
            building_block(problem.placement, ticks, work * stretch // 100, delays)
            for stretch in (100, 103, 107, 115, 125, 150)
            for delays in _delays(legs, [0, slot // 2, slot, 2 * slot])
        ]
    found: dict[Order, Block] = {}
    for block in drawn:
        if block is None:
            continue
        held = block.held(problem.ticks.activation)
        if all(need <= cap for need, cap in zip(held, problem.caps, strict=True)):
            found.setdefault(block.order(2), block)
    return sorted(found.values(), key=lambda block: block.backward[0] / block.interval)


def _delays(legs: int, choices: Sequence[int]) -> list[tuple[int, ...]]:
    """Every choice of delays for the legs; beyond four legs forward and backward legs agree."""
    if legs <= 4:
        return list(product(choices, repeat=legs))
    half = legs // 2
    return [(a,) * half + (b,) * half for a, b in product(choices, repeat=2)]


def keep(problem: Problem, block: Block, overrun: int = 0) -> Policy:
    """The policy that keeps a block's order whatever the costs."""
    return Policy(
        period=0,
        forward=(0,) * problem.ticks.stages,
        backward=(0,) * problem.ticks.stages,
        order=block.order(problem.microbatches),
        weight_overrun=overrun,
    )


def follow(problem: Problem, block: Block, overrun: int = 0) -> Policy:
    """The policy that takes a block's slots as due times, and whatever is ready first."""
    work = problem.longest_work
    return Policy(
        period=work,
        forward=tuple(slot * work // block.interval for slot in block.forward),
        backward=tuple(slot * work // block.interval for slot in block.backward),
        weight_overrun=overrun,
    )


def best(problem: Problem, tries: int) -> tuple[Arrangement, Block | None]:
    """The shortest of about `tries` arrangements, and the block that it came from.

    Candidates are compared on few microbatches first, and only the best few on all.

    Raises:
        ScheduleError: a cap is below what one microbatch needs.
    """
    plain = Policy(
        period=1,
        forward=tuple(range(problem.ticks.stages)),
        backward=(-1,) * problem.ticks.stages,
    )
    best_found, best_block = arrange(problem, plain), None
    for block, policy in _shortlist(problem, tries):
        try:
            found = arrange(problem, policy)
        except ScheduleError:
            continue
        if found.makespan < best_found.makespan:
            best_found, best_block = found, block
    return best_found, best_block


def _shortlist(problem: Problem, tries: int) -> list[tuple[Block, Policy]]:
    few = min(problem.microbatches, 2 * problem.ranks + 2)
    small = evolve(problem, microbatches=few)
    cost = few / problem.microbatches
    finalists = max(2, tries // 4)
    affordable = max(4, int((tries - finalists) / cost))
    weight = max(problem.ticks.backward_weight)
    variants = [
        (block, make, overrun)
        for block in _spread(blocks(problem), max(1, affordable // 3))
        for make, overrun in ((keep, 0), (keep, weight // 3), (follow, 0))
    ]
    scored = []
    for place, (block, make, overrun) in enumerate(variants):
        try:
            scored.append((arrange(small, make(small, block, overrun)).makespan, place))
        except ScheduleError:
            continue
    chosen = [variants[place] for _, place in sorted(scored)[:finalists]]
    return [(block, make(problem, block, overrun)) for block, make, overrun in chosen]


def _spread(ordered: Sequence[Block], count: int) -> list[Block]:
    """At most `count` items, evenly spread over the sequence."""
    if len(ordered) <= count:
        return list(ordered)
    return [ordered[index * len(ordered) // count] for index in range(count)]
