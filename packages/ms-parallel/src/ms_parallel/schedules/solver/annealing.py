"""Improves an arrangement by simulated annealing: of a block's delays, and of the order of actions.

Both walks depend on a seed and a number of steps alone.
"""

from collections.abc import Sequence
from contextlib import suppress
from math import exp
from random import Random

from attrs import evolve

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.construction.building_block import BuildingBlock, building_block
from ms_parallel.schedules.construction.list_scheduler import arrange
from ms_parallel.schedules.construction.policies import follow, keep_order
from ms_parallel.schedules.construction.problem import Arrangement, Problem
from ms_parallel.schedules.solver.play import Played, Player

_STRETCHES = (100, 104, 110, 118, 130)
WARM, COOL = (0.012, 0.008, 0.004), (0.006, 0.003, 0.0015)
"""First temperatures of walks over orders, in makespans: about what a displaced action costs in a
short step, and in a long one."""
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
                    best = arrange(problem, policy, limit=best.makespan)
    return best


def _walk(
    problem: Problem, interval: int, patience: int, steps: int, seed: int
) -> BuildingBlock | None:
    """Find a block of least memory beyond the caps, then of shortest way; None if over a cap."""
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


def _weigh(
    problem: Problem, interval: int, delays: Sequence[int]
) -> tuple[BuildingBlock | None, float]:
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


def anneal_order(
    problem: Problem, start: Arrangement, budget: int, seed: int, heats: Sequence[float]
) -> Arrangement:
    """Swap neighbours of one rank that both lie on a critical path; only such can shorten it.

    A swap is made once, or wherever in the row the same two meet again, which keeps what is
    periodic so.
    """
    steps = budget // (problem.actions * len(heats))
    if steps < _SHORTEST_WALK:
        return start
    best, walker = start, _Walker(problem)
    for walk, heat in enumerate(heats):
        best = walker.walk(best, steps, heat * start.makespan, Random(seed + walk))
    return best


def _number(row: Sequence[int], places: list[int]) -> None:
    for at, op in enumerate(row):
        places[op] = at


class _Walker:
    """Walks over orders of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.player = player = Player(problem)
        ticks = problem.ticks
        self.family = [kind * ticks.stages + stage for kind, stage, _ in player.ops]
        kept = [(a, r) for a, r in zip(ticks.activation, ticks.retained, strict=True)]
        change = [lambda a, r: a, lambda a, r: r - a, lambda a, r: -r]
        self.memory = [change[kind](*kept[stage]) for kind, stage, _ in player.ops]

    def walk(self, start: Arrangement, steps: int, hottest: float, random: Random) -> Arrangement:
        """Walk while cooling down; return the best order met."""
        player = self.player
        rows = [[player.number(op) for op in row] for row in start.rows]
        played = player.play(rows)
        assert played is not None  # it was arranged
        best, shortest = rows, start.makespan
        places = [0] * len(player.ops)
        """Each action's index in its row."""
        for row in rows:
            _number(row, places)
        pairs = self._critical(rows, played, places)
        for step in range(steps):
            if not pairs:
                break
            heat = hottest * (1 - step / steps)
            rank, at = random.choice(pairs)
            swapped = self._swapped(rows[rank], at, random.random())
            if swapped is None or not self._fits(rank, swapped):
                continue
            tried = [*rows[:rank], swapped, *rows[rank + 1 :]]
            pairwise = zip(rows[rank], swapped, strict=True)
            first = next(at for at, (old, new) in enumerate(pairwise) if old != new)
            since = played.starts[rows[rank][first]]
            moved = player.replay(tried, played, rank, first, since)
            if moved is None:
                continue
            worse = moved.end - played.end
            if worse <= 0 or random.random() < exp(-worse / heat):
                rows, played = tried, moved
                _number(swapped, places)
                pairs = self._critical(rows, played, places)
                if played.end < shortest:
                    best, shortest = rows, played.end
        made = tuple(tuple(player.ops[op] for op in row) for row in best)
        return Arrangement(rows=made, makespan=shortest, peaks=start.peaks)

    def _critical(
        self, rows: Sequence[list[int]], played: Played, places: list[int]
    ) -> list[tuple[int, int]]:
        """List (rank, index) of all on a critical path that start as their left neighbour ends."""
        player, starts, end = self.player, played.starts, played.end
        length, source, rank_of = player.length, player.source, player.rank
        op = min(row[-1] for row in rows if row and starts[row[-1]] + length[row[-1]] == end)
        pairs = []
        while op >= 0:
            rank, at = rank_of[op], places[op]
            left = rows[rank][at - 1] if at else -1
            if left >= 0 and starts[left] + length[left] == starts[op]:
                pairs.append((rank, at))
                op = left
            else:
                op = source[op]
        return pairs

    def _fits(self, rank: int, row: list[int]) -> bool:
        held, cap, memory = 0, self.problem.caps[rank], self.memory
        for op in row:
            held += memory[op]
            if held > cap:
                return False
        return True

    def _swapped(self, row: list[int], at: int, way: float) -> list[int] | None:
        """Swap two neighbours in a row: these alone, or all such, from here on or throughout.

        Two that must keep their order give None.
        """
        first, second = row[at - 1], row[at]
        one, two, count = self.family[first], self.family[second], self.player.count
        stages = self.player.stages
        apart = second % count - first % count
        if one == two or (apart == 0 and one % stages == two % stages):
            return None
        new = list(row)
        if way < 0.6:
            new[at - 1 : at + 1] = second, first
            return new
        index, family = at - 1 if way > 0.8 else 0, self.family
        while index + 1 < len(row):
            a, b = new[index], new[index + 1]
            if family[a] == one and family[b] == two and b % count - a % count == apart:
                new[index : index + 2] = b, a
                index += 1
            index += 1
        return new
