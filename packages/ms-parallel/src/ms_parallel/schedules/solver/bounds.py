"""Lower bounds on the makespan of any order of actions: the larger of two bounds.

1. Work. A rank's work must fit between the earliest times at which its inputs can exist and the
   minimum time that other ranks need after its outputs. The relaxation to a preemptive one-machine
   problem with heads and tails is solved exactly by Jackson's rule.
2. Memory. The integral of a rank's memory over time is at least the sum over its microbatches on
   their shortest paths from forward to backward, so a cap implies a minimum length. Memory also
   fills at most at the rate of forwards and empties at most at the rate of backwards, which makes
   the bound tighter.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from attrs import evolve

from ms_parallel.schedules.construction.problem import Problem

_Job = tuple[int, int, int]
"""(earliest start, length, minimum time from its end to the end of the schedule)."""


def lower_bound(problem: Problem) -> int:
    """Lower bound in ticks on the makespan of any schedule of `problem`."""
    paths = _Paths(problem)
    bound = _by_work(evolve(problem, caps=[0] * problem.ranks))
    for rank in range(problem.ranks):
        bound = max(bound, paths.memory(rank, bound))
    return bound


@lru_cache(maxsize=8)
def _by_work(problem: Problem) -> int:
    """Bound without memory caps; cached, since it does not change during a search."""
    paths = _Paths(problem)
    return max(_one_machine(paths.jobs(rank)) for rank in range(problem.ranks))


class _Paths:
    """Shortest paths of a microbatch through an empty pipeline."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        ticks, placement, stages = problem.ticks, problem.placement, problem.ticks.stages
        hop = [
            ticks.transfer[s] + ticks.latency if placement[s] != placement[s + 1] else 0
            for s in range(stages - 1)
        ]
        self.lengths = [*ticks.forward, *reversed(ticks.backward_input)]
        hops = [*hop, 0, *reversed(hop), 0]
        # starts[n]: earliest start of the n-th computation of the path F0, F1, ..., I1, I0.
        self.starts = [0]
        for length, delay in zip(self.lengths, hops, strict=True):
            self.starts.append(self.starts[-1] + length + delay)
        # tails[n]: minimum time from the end of computation n to the end of the last W.
        self.tails = [0] * len(self.lengths)
        for step in reversed(range(len(self.lengths))):
            tail = 0
            if step + 1 < len(self.lengths):
                tail = hops[step] + self.lengths[step + 1] + self.tails[step + 1]
            if step >= stages:
                tail = max(tail, ticks.backward_weight[2 * stages - 1 - step])
            self.tails[step] = tail

    def jobs(self, rank: int) -> list[_Job]:
        """List the computations of a rank, with heads and tails.

        In any order, the k-th start of a computation is preceded by k passes through every earlier
        computation on the path, and followed by the remaining passes through every later one.
        """
        count, ticks = self.problem.microbatches, self.problem.ticks
        jobs = []
        for stage, stage_rank in enumerate(self.problem.placement):
            if stage_rank != rank:
                continue
            # Forward and input backward of the stage, by their index on the path.
            for step in (stage, 2 * ticks.stages - 1 - stage):
                slow_before = max(self.lengths[:step], default=0)
                slow_after = max(self.lengths[step + 1 :], default=0)
                jobs += [
                    (
                        self.starts[step] + k * slow_before,
                        self.lengths[step],
                        self.tails[step] + (count - 1 - k) * slow_after,
                    )
                    for k in range(count)
                ]
            step = 2 * ticks.stages - 1 - stage
            slowest = max(self.lengths[: step + 1])
            # Weight backwards: ready after the input backward, and nothing has to follow them.
            ready_time = self.starts[step] + self.lengths[step]
            length = ticks.backward_weight[stage]
            jobs += [(ready_time + k * slowest, length, 0) for k in range(count)]
        return jobs

    def memory(self, rank: int, bound: int) -> int:
        """Minimum end, at least `bound`, at which the cap has room for the memory of a rank.

        A microbatch needs its activation from its forward to its input backward, and its retained
        memory while the weight backward runs. The available area is the integral of the maximum
        memory at each time: the cap, limited at the start by what consecutive forwards can have
        built up, and at the end by what consecutive backwards can still free.
        """
        ticks, cap, count = self.problem.ticks, self.problem.caps[rank], self.problem.microbatches
        stages = [
            stage for stage, stage_rank in enumerate(self.problem.placement) if stage_rank == rank
        ]
        # Areas are memory times ticks, summed over microbatches.
        activation_area = retained_area = 0
        for stage in stages:
            largest = 2 * ticks.stages - 1 - stage
            # Shortest time from the start of F to the end of I.
            lifespan = self.starts[largest] + self.lengths[largest] - self.starts[stage]
            activation_area += lifespan * ticks.activation[stage] * count
            retained_area += ticks.backward_weight[stage] * ticks.retained[stage] * count
        first = min(self.starts[stage] for stage in stages)
        if not cap:
            return bound
        tail = min(self.tails[2 * ticks.stages - 1 - stage] for stage in stages)
        largest = max(ticks.activation[stage] for stage in stages)

        def rate(passes: Sequence[tuple[int, int]]) -> Fraction | None:
            """Maximum memory per tick, of (memory, ticks) pairs; None for no limit."""
            if any(size and not length for size, length in passes):
                return None
            return max((Fraction(size, length) for size, length in passes if size), default=None)

        size, retained = ticks.activation, ticks.retained
        # Steepest rise by forwards, and steepest falls by input and by full backwards.
        rise_rate = rate([(size[s], ticks.forward[s]) for s in stages])
        input_rate = rate([(size[s], ticks.backward_input[s]) for s in stages])
        full_rate = rate(
            [(size[s], ticks.backward_input[s] + ticks.backward_weight[s]) for s in stages]
        )
        weight_rate = rate([(retained[s], ticks.backward_weight[s]) for s in stages])
        fall_rate = (
            None
            if full_rate is None or (weight_rate is None and any(retained))
            else max(full_rate, weight_rate or full_rate)
        )
        rise = _Slope(largest, rise_rate)
        falls = [_Slope(largest, full_rate), _Slope(largest, input_rate, tail)]
        length = _min_length(max(0, bound - first), activation_area, cap, rise, falls)
        return first + _min_length(
            length, activation_area + retained_area, cap, rise, [_Slope(largest, fall_rate)]
        )


class _Slope(NamedTuple):
    """Maximum memory as a function of the distance from the first start or the last end.

    0 before `after`, then `step`, then growing by `rate` per tick; no limit if `rate` is None.
    """

    step: int
    rate: Fraction | None
    after: int = 0

    def reaches(self, cap: int) -> Fraction:
        """Distance at which the cap is reached."""
        if self.rate is None:
            return Fraction(self.after)
        return self.after + max(Fraction(0), (cap - self.step) / self.rate)

    def at(self, distance: Fraction) -> Fraction | None:
        """Maximum memory at a distance; None if unlimited."""
        if distance < self.after:
            return Fraction(0)
        return None if self.rate is None else self.step + self.rate * (distance - self.after)


def _min_length(bound: int, area: int, cap: int, rise: _Slope, falls: Sequence[_Slope]) -> int:
    """Bisect the minimum length, at least `bound`, whose area is at least `area`."""
    if not area or (bound and _area(bound, cap, rise, falls) >= area):
        return bound
    # Double the length until the area suffices, then bisect.
    low, high = bound, 2 * bound or 1
    while _area(high, cap, rise, falls) < area:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _area(middle, cap, rise, falls) < area:
            low = middle
        else:
            high = middle
    return high


def _area(length: int, cap: int, rise: _Slope, falls: Sequence[_Slope]) -> Fraction:
    """Integrate the minimum of the cap, the rise and the falls from 0 to `length`."""
    end = Fraction(length)
    lines = [(rise, False), *((fall, True) for fall in falls)]
    cuts = {Fraction(0), end}
    for slope, falling in lines:
        for point in (Fraction(slope.after), slope.reaches(cap)):
            cuts.add(end - point if falling else point)
    for fall in falls:
        for first, second in (
            (rise, fall),
            *((fall, fall_line) for fall_line in falls if fall_line is not fall),
        ):
            cuts |= _crossings(first, first is not rise, second, end)
    inside = sorted(cut for cut in cuts if 0 <= cut <= end)

    def bound_at(time: Fraction) -> Fraction:
        lowest = Fraction(cap)
        for slope, falling in lines:
            limit = slope.at(end - time if falling else time)
            lowest = lowest if limit is None else min(lowest, limit)
        return lowest

    # Between neighboring cuts the minimum is linear, so its mean is its value in the middle.
    return sum(
        ((b - a) * bound_at((a + b) / 2) for a, b in pairwise(inside)),
        Fraction(0),
    )


def _crossings(line: _Slope, line_falls: bool, fall: _Slope, end: Fraction) -> set[Fraction]:
    """Times at which a line crosses a falling one, from the first start."""
    if line.rate is None or fall.rate is None:
        return set()
    # line: a + b·t; fall: c - d·t, for time t from the first start.
    a = line.step + line.rate * ((end - line.after) if line_falls else -line.after)
    b = -line.rate if line_falls else line.rate
    c, d = fall.step + fall.rate * (end - fall.after), fall.rate
    return set() if b + d == 0 else {(c - a) / (b + d)}


def _one_machine(jobs: Sequence[_Job]) -> int:
    """Minimum makespan of a machine with preemption: run the ready job with the longest tail."""
    by_start = sorted(jobs)
    ready_jobs: list[list[int]] = []
    time = bound = index = 0
    while index < len(by_start) or ready_jobs:
        if not ready_jobs:
            time = max(time, by_start[index][0])
        while index < len(by_start) and by_start[index][0] <= time:
            heappush(ready_jobs, [-by_start[index][2], by_start[index][1]])
            index += 1
        job = ready_jobs[0]
        end = time + job[1]
        if index < len(by_start) and by_start[index][0] < end:
            # Preempted: a job that has just arrived may have a longer tail.
            job[1] -= by_start[index][0] - time
            time = by_start[index][0]
            continue
        heappop(ready_jobs)
        time = end
        # Tails are stored negated, so this adds the tail.
        bound = max(bound, time - job[0])
    return bound
