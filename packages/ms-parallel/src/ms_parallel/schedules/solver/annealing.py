"""Simulated annealing of an arrangement: of a block's delays, and of the order of actions.

Both walks depend only on a seed and a number of steps.
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
from ms_parallel.schedules.solver.row_simulator import RowSimulator, RowTimes

_STRETCHES = (100, 104, 110, 118, 130)
WARM, COOL = (0.012, 0.008, 0.004), (0.006, 0.003, 0.0015)
"""Initial temperatures of walks over orders, relative to the makespan: the typical cost of one
displaced action in a short and in a long step."""
_SHORTEST_WALK = 40


def anneal_blocks(problem: Problem, start: Arrangement, budget: int, seed: int) -> Arrangement:
    """Try blocks with a separate delay per hop, for intervals from tight to loose.

    Building a block costs about twice as much as scheduling its actions once, independent of the
    number of microbatches, so walks over blocks can be much longer than over schedules.
    """
    actions = 3 * problem.ticks.stages
    steps = budget // (2 * actions * len(_STRETCHES))
    best = start
    for stretch in _STRETCHES:
        interval = problem.longest_work * stretch // 100
        # Start without delays, then with a uniform one.
        for patience in (0, 1):
            block = _walk(problem, interval, patience, steps // 2, seed)
            if block is None:
                continue
            ordered = keep_order(problem, block.order(problem.microbatches))
            overrun = max(problem.ticks.backward_weight) // 3
            for policy in (
                ordered,
                evolve(ordered, weight_overrun=overrun),
                follow(problem, block),
            ):
                with suppress(ScheduleError):
                    best = arrange(problem, policy, limit=best.makespan)
    return best


def _walk(
    problem: Problem, interval: int, patience: int, steps: int, seed: int
) -> BuildingBlock | None:
    """Minimize a block's memory above the caps, then its path length; None if above a cap."""
    random, ticks, hops = Random(seed), problem.ticks, 2 * problem.ticks.stages
    step_size = max(1, problem.longest_work * problem.ranks // (6 * hops))
    delays = [patience * step_size] * hops
    block, cost = _cost(problem, interval, delays)
    best, best_cost = block, cost
    for step in range(steps):
        # Linear cooling to zero.
        temperature = interval * 0.5 * (1 - step / steps)
        trial = list(delays)
        first_hop, second_hop = random.randrange(hops), random.randrange(hops)
        change = random.choice((-2, -1, 1, 2)) * step_size
        trial[first_hop] = max(0, trial[first_hop] + change)
        # Move the delay from one hop to another instead of adding it.
        if random.random() < 0.4:
            trial[second_hop] = max(0, trial[second_hop] - change)
        candidate, candidate_cost = _cost(problem, interval, trial)
        # Metropolis rule: accept some changes for the worse while it is warm.
        if candidate_cost <= cost or random.random() < exp((cost - candidate_cost) / temperature):
            delays, cost = trial, candidate_cost
            if candidate_cost < best_cost:
                best, best_cost = candidate, candidate_cost
    if best is None or any(
        memory > cap
        for memory, cap in zip(best.peak_memory(ticks.activation), problem.caps, strict=True)
    ):
        return None
    return best


def _cost(
    problem: Problem, interval: int, delays: Sequence[int]
) -> tuple[BuildingBlock | None, float]:
    block = building_block(problem.placement, problem.ticks, interval, delays)
    if block is None:
        return None, 1e30
    excess = 0.0
    peaks = block.peak_memory(problem.ticks.activation)
    mean_memory = [0] * problem.ranks
    for stage, rank in enumerate(problem.placement):
        lifespan = block.backward[stage] - block.forward[stage]
        mean_memory[rank] += lifespan * problem.ticks.activation[stage]
    for peak, area, cap in zip(peaks, mean_memory, problem.caps, strict=True):
        # Peak memory above the cap, and with less weight the mean, which changes more smoothly.
        excess += max(0, peak - cap) * interval + 0.2 * max(0, area - cap * interval)
    # Memory above the caps dominates; otherwise a short path is better.
    return block, excess / max(problem.ticks.activation) + 0.01 * block.backward[0]


def anneal_order(
    problem: Problem, start: Arrangement, budget: int, seed: int, temperatures: Sequence[float]
) -> Arrangement:
    """Swap neighboring actions on a critical path; no other swap can shorten it.

    A swap applies to one pair, or to all occurrences of the pair in the row, which preserves
    periodic orders.
    """
    steps = budget // (problem.actions * len(temperatures))
    if steps < _SHORTEST_WALK:
        return start
    best, walker = start, _Walker(problem)
    for walk, temperature in enumerate(temperatures):
        best = walker.walk(best, steps, temperature * start.makespan, Random(seed + walk))
    return best


def _index_row(row: Sequence[int], positions: list[int]) -> None:
    for index, op in enumerate(row):
        positions[op] = index


class _Walker:
    """Random walks over orders of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.simulator = simulator = RowSimulator(problem)
        ticks = problem.ticks
        self.family = [phase * ticks.stages + stage for phase, stage, _ in simulator.ops]
        sizes = [(a, r) for a, r in zip(ticks.activation, ticks.retained, strict=True)]
        # F adds the activation, I reduces it to the retained part, W frees that.
        change = [lambda a, r: a, lambda a, r: r - a, lambda a, r: -r]
        self.memory = [change[phase](*sizes[stage]) for phase, stage, _ in simulator.ops]

    def walk(
        self, start: Arrangement, steps: int, initial_temperature: float, random: Random
    ) -> Arrangement:
        """Walk with decreasing temperature; return the best order."""
        simulator = self.simulator
        rows = [[simulator.number(op) for op in row] for row in start.rows]
        times = simulator.simulate(rows)
        assert times is not None  # the start is a valid arrangement
        best, shortest = rows, start.makespan
        positions = [0] * len(simulator.ops)
        """Index of each action in its row."""
        for row in rows:
            _index_row(row, positions)
        pairs = self._critical(rows, times, positions)
        for step in range(steps):
            if not pairs:
                break
            temperature = initial_temperature * (1 - step / steps)
            rank, index = random.choice(pairs)
            swapped = self._swapped(rows[rank], index, random.random())
            if swapped is None or not self._fits(rank, swapped):
                continue
            trial = [*rows[:rank], swapped, *rows[rank + 1 :]]
            pairwise = zip(rows[rank], swapped, strict=True)
            first = next(index for index, (old, new) in enumerate(pairwise) if old != new)
            # Everything that starts earlier is unaffected, so only the rest is replayed.
            change_time = times.starts[rows[rank][first]]
            replayed = simulator.resimulate(trial, times, rank, first, change_time)
            if replayed is None:
                continue
            increase = replayed.end - times.end
            if increase <= 0 or random.random() < exp(-increase / temperature):
                rows, times = trial, replayed
                _index_row(swapped, positions)
                pairs = self._critical(rows, times, positions)
                if times.end < shortest:
                    best, shortest = rows, times.end
        result_rows = tuple(tuple(simulator.ops[op] for op in row) for row in best)
        return Arrangement(rows=result_rows, makespan=shortest, peaks=start.peaks)

    def _critical(
        self, rows: Sequence[list[int]], times: RowTimes, positions: list[int]
    ) -> list[tuple[int, int]]:
        """(rank, index) of critical actions that start when their left neighbor ends."""
        simulator, starts, end = self.simulator, times.starts, times.end
        length, source, rank_of = simulator.length, simulator.source, simulator.rank
        # Follow a critical path back from an action that ends last.
        op = min(row[-1] for row in rows if row and starts[row[-1]] + length[row[-1]] == end)
        pairs = []
        while op >= 0:
            rank, index = rank_of[op], positions[op]
            previous = rows[rank][index - 1] if index else -1
            # It waited for its rank, so a swap with its neighbor may help; otherwise for its input.
            if previous >= 0 and starts[previous] + length[previous] == starts[op]:
                pairs.append((rank, index))
                op = previous
            else:
                op = source[op]
        return pairs

    def _fits(self, rank: int, row: list[int]) -> bool:
        used, cap, memory = 0, self.problem.caps[rank], self.memory
        for op in row:
            used += memory[op]
            if used > cap:
                return False
        return True

    def _swapped(self, row: list[int], position: int, choice: float) -> list[int] | None:
        """Swap two neighbors in a row, and possibly all such pairs from here on or in the row.

        None if the two must keep their order.
        """
        first, second = row[position - 1], row[position]
        first_family, second_family, count = (
            self.family[first],
            self.family[second],
            self.simulator.count,
        )
        stages = self.simulator.stages
        distance = second % count - first % count
        # The same pass of two microbatches, or two passes of one microbatch: the order is fixed.
        if first_family == second_family or (
            distance == 0 and first_family % stages == second_family % stages
        ):
            return None
        new = list(row)
        if choice < 0.6:
            new[position - 1 : position + 1] = second, first
            return new
        # Swap all such pairs from here on, or in the entire row.
        index, family = position - 1 if choice > 0.8 else 0, self.family
        while index + 1 < len(row):
            a, b = new[index], new[index + 1]
            if (
                family[a] == first_family
                and family[b] == second_family
                and b % count - a % count == distance
            ):
                new[index : index + 2] = b, a
                index += 1
            index += 1
        return new
