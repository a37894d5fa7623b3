"""Improves an arrangement by annealing: delays of a block, hop by hop, and orders of actions.

Both walks are functions of a seed and a number of steps alone.
"""

from collections.abc import Sequence
from contextlib import suppress
from math import exp
from random import Random

from attrs import evolve

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.arrange import Arrangement, Problem, arrange
from ms_parallel.schedules.building_block import Block, building_block
from ms_parallel.schedules.play import play_rows
from ms_parallel.schedules.portfolio import follow, keep_order

__all__ = ["anneal_blocks", "anneal_order"]

_Op = tuple[int, int, int]
_Row = list[_Op]
_STRETCHES = (100, 104, 110, 118, 130)
_HEATS = (0.012, 0.008, 0.004)
"""First temperatures of the order's walks, in makespans: about what a displaced action costs."""
_SHORTEST_WALK = 40


def anneal_blocks(problem: Problem, start: Arrangement, budget: int, seed: int) -> Arrangement:
    """Try blocks whose delays differ from hop to hop, for intervals from tight to loose.

    Drawing a block costs about as much as scheduling its actions twice, whatever the number of
    microbatches, so much longer walks are affordable than with whole schedules.
    """
    actions = 3 * problem.ticks.stages
    steps = budget // (2 * actions * len(_STRETCHES))
    best = start
    for stretch in _STRETCHES:
        interval = problem.longest_work * stretch // 100
        for patience in (0, 1):
            block = _walk(problem, interval, patience, steps // 2, seed)
            if block is None:
                continue
            kept = keep_order(problem, block.order(problem.microbatches))
            overrun = max(problem.ticks.backward_weight) // 3
            for policy in (kept, evolve(kept, weight_overrun=overrun), follow(problem, block)):
                with suppress(ScheduleError):
                    found = arrange(problem, policy)
                    best = min(best, found, key=lambda each: each.makespan)
    return best


def _walk(problem: Problem, interval: int, patience: int, steps: int, seed: int) -> Block | None:
    """The block of least memory beyond the caps, and then of shortest way, or None over a cap."""
    random, ticks, hops = Random(seed), problem.ticks, 2 * problem.ticks.stages
    grain = max(1, problem.longest_work * problem.ranks // (6 * hops))
    delays = [patience * grain] * hops
    block, cost = _weigh(problem, interval, delays)
    best, least = block, cost
    for step in range(steps):
        heat = interval * 0.5 * (1 - step / steps)
        tried = list(delays)
        one, other = random.randrange(hops), random.randrange(hops)
        change = random.choice((-2, -1, 1, 2)) * grain
        tried[one] = max(0, tried[one] + change)
        if random.random() < 0.4:
            tried[other] = max(0, tried[other] - change)
        candidate, price = _weigh(problem, interval, tried)
        if price <= cost or random.random() < exp((cost - price) / heat):
            delays, cost = tried, price
            if price < least:
                best, least = candidate, price
    if best is None or any(
        need > cap for need, cap in zip(best.held(ticks.activation), problem.caps, strict=True)
    ):
        return None
    return best


def _weigh(problem: Problem, interval: int, delays: Sequence[int]) -> tuple[Block | None, float]:
    block = building_block(problem.placement, problem.ticks, interval, delays)
    if block is None:
        return None, 1e30
    over = 0.0
    held = block.held(problem.ticks.activation)
    mean = [0] * problem.ranks
    for stage, rank in enumerate(problem.placement):
        alive = block.backward[stage] - block.forward[stage]
        mean[rank] += alive * problem.ticks.activation[stage]
    for need, area, cap in zip(held, mean, problem.caps, strict=True):
        over += max(0, need - cap) * interval + 0.2 * max(0, area - cap * interval)
    return block, over / max(problem.ticks.activation) + 0.01 * block.backward[0]


def anneal_order(problem: Problem, start: Arrangement, budget: int, seed: int) -> Arrangement:
    """Swap neighbours of one rank that both lie on a critical path; only such can shorten it.

    A swap is made once, or wherever in the row the same two meet again, which keeps what is
    periodic so.
    """
    steps = budget // (3 * problem.ticks.stages * problem.microbatches * len(_HEATS))
    best = start
    for walk, heat in enumerate(_HEATS if steps >= _SHORTEST_WALK else ()):
        best = _walk_orders(problem, best, steps, heat * start.makespan, Random(seed + walk))
    return best


def _walk_orders(
    problem: Problem, start: Arrangement, steps: int, hottest: float, random: Random
) -> Arrangement:
    rows = [list(row) for row in start.rows]
    starts = play_rows(problem, rows)
    length, best, shortest = start.makespan, rows, start.makespan
    pairs = _critical(problem, rows, starts)
    for step in range(steps):
        if not pairs:
            break
        heat = hottest * (1 - step / steps)
        rank, at = random.choice(pairs)
        row = _swapped(rows[rank], at, random.random())
        if row is None or not _fits(problem, rank, row):
            continue
        tried = [*rows[:rank], row, *rows[rank + 1 :]]
        with suppress(ScheduleError):
            moved = play_rows(problem, tried)
            makespan = _end(problem, moved)
            worse = makespan - length
            if worse <= 0 or random.random() < exp(-worse / heat):
                rows, length, starts = tried, makespan, moved
                pairs = _critical(problem, rows, starts)
                if length < shortest:
                    best, shortest = rows, length
    return Arrangement(rows=tuple(map(tuple, best)), makespan=shortest, peaks=start.peaks)


def _end(problem: Problem, starts: dict[_Op, int]) -> int:
    lengths = problem.lengths
    return max(start + lengths[op[0]][op[1]] for op, start in starts.items())


def _critical(
    problem: Problem, rows: Sequence[_Row], starts: dict[_Op, int]
) -> list[tuple[int, int]]:
    """(rank, index) of each action on a critical path that starts when its left neighbour ends."""
    lengths, last = problem.lengths, problem.ticks.stages - 1
    index = {op: (rank, at) for rank, row in enumerate(rows) for at, op in enumerate(row)}
    op = max(starts, key=lambda each: starts[each] + lengths[each[0]][each[1]])
    pairs = []
    while True:
        rank, at = index[op]
        before = rows[rank][at - 1] if at else None
        if before and starts[before] + lengths[before[0]][before[1]] == starts[op]:
            pairs.append((rank, at))
            op = before
            continue
        kind, stage, number = op
        if kind == 0:
            source = (0, stage - 1, number)
        elif kind == 1:
            source = (1, stage + 1, number) if stage < last else (0, stage, number)
        else:
            source = (1, stage, number)
        if source not in starts:
            return pairs
        op = source


def _fits(problem: Problem, rank: int, row: _Row) -> bool:
    ticks, held, cap = problem.ticks, 0, problem.caps[rank]
    for kind, stage, _ in row:
        if kind == 0:
            held += ticks.activation[stage]
            if held > cap:
                return False
        elif kind == 1:
            held -= ticks.activation[stage] - ticks.retained[stage]
        else:
            held -= ticks.retained[stage]
    return True


def _swapped(row: _Row, at: int, way: float) -> _Row | None:
    first, second = row[at - 1], row[at]
    if first[:2] == second[:2] or (first[1:] == second[1:]):
        return None
    new = list(row)
    if way < 0.6:
        new[at - 1 : at + 1] = second, first
        return new
    apart = second[2] - first[2]
    index = at - 1 if way > 0.8 else 0
    while index + 1 < len(row):
        one, two = new[index], new[index + 1]
        if one[:2] == first[:2] and two[:2] == second[:2] and two[2] - one[2] == apart:
            new[index : index + 2] = two, one
            index += 1
        index += 1
    return new
