"""Makespans that no schedule can beat, whatever its order.

Two arguments, the larger counts. A rank cannot finish before its work fits between the earliest
moments at which its inputs can exist and the least time that others need after its outputs: the
preemptive one-machine schedule with heads and tails (Jackson's rule) is a relaxation solved
exactly. And a rank's memory times time is at least what its microbatches occupy on their shortest
way from forward to backward, so a cap forces a length: the longer as memory fills up at first only
as fast as forwards run, and is given back at last only as fast as backwards do.
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
"""(earliest start, length, least time from its end to the end of everything)."""


def lower_bound(problem: Problem) -> int:
    """Compute the ticks below which no schedule of `problem` can stay."""
    ways = _Ways(problem)
    bound = _by_work(evolve(problem, caps=[0] * problem.ranks))
    for rank in range(problem.ranks):
        bound = max(bound, ways.memory(rank, bound))
    return bound


@lru_cache(maxsize=8)
def _by_work(problem: Problem) -> int:
    """Compute the bound that knows no caps; it is kept, as it is the same for all of a search."""
    ways = _Ways(problem)
    return max(_one_machine(ways.jobs(rank)) for rank in range(problem.ranks))


class _Ways:
    """Shortest ways of a microbatch through the pipeline, as if it were alone."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        ticks, home, stages = problem.ticks, problem.placement, problem.ticks.stages
        hop = [
            ticks.transfer[s] + ticks.latency if home[s] != home[s + 1] else 0
            for s in range(stages - 1)
        ]
        self.lengths = [*ticks.forward, *reversed(ticks.backward_input)]
        hops = [*hop, 0, *reversed(hop), 0]
        # starts[n]: earliest start of the n-th step of the way F0, F1, ..., I1, I0.
        self.starts = [0]
        for length, pause in zip(self.lengths, hops, strict=True):
            self.starts.append(self.starts[-1] + length + pause)
        # rests[n]: least time from the end of step n to the end of the step's last W.
        self.rests = [0] * len(self.lengths)
        for step in reversed(range(len(self.lengths))):
            rest = 0
            if step + 1 < len(self.lengths):
                rest = hops[step] + self.lengths[step + 1] + self.rests[step + 1]
            if step >= stages:
                rest = max(rest, ticks.backward_weight[2 * stages - 1 - step])
            self.rests[step] = rest

    def jobs(self, rank: int) -> list[_Job]:
        """List everything that a rank computes, with heads and tails.

        The k-th start of any step is preceded by k passes through every earlier step, and
        followed by the others through every later one, whatever their order.
        """
        count, ticks = self.problem.microbatches, self.problem.ticks
        jobs = []
        for stage, home in enumerate(self.problem.placement):
            if home != rank:
                continue
            for step in (stage, 2 * ticks.stages - 1 - stage):
                slow_before = max(self.lengths[:step], default=0)
                slow_after = max(self.lengths[step + 1 :], default=0)
                jobs += [
                    (
                        self.starts[step] + k * slow_before,
                        self.lengths[step],
                        self.rests[step] + (count - 1 - k) * slow_after,
                    )
                    for k in range(count)
                ]
            step = 2 * ticks.stages - 1 - stage
            slow = max(self.lengths[: step + 1])
            begin = self.starts[step] + self.lengths[step]
            length = ticks.backward_weight[stage]
            jobs += [(begin + k * slow, length, 0) for k in range(count)]
        return jobs

    def memory(self, rank: int, known: int) -> int:
        """Find the least end, from `known` on, at which the rank's cap holds what it must.

        A microbatch holds its activation from its forward to its backward of inputs (*whole*), and
        what the backward of weights needs while that runs. The room is the integral of the most
        that can be held at each moment: the cap; at first, what forwards in a row can have built
        up; at last, what backwards in a row can still take down before the end.
        """
        ticks, cap, count = self.problem.ticks, self.problem.caps[rank], self.problem.microbatches
        mine = [stage for stage, home in enumerate(self.problem.placement) if home == rank]
        whole = kept = 0
        for stage in mine:
            step = 2 * ticks.stages - 1 - stage
            alive = self.starts[step] + self.lengths[step] - self.starts[stage]
            whole += alive * ticks.activation[stage] * count
            kept += ticks.backward_weight[stage] * ticks.retained[stage] * count
        first = min(self.starts[stage] for stage in mine)
        if not cap:
            return known
        rest = min(self.rests[2 * ticks.stages - 1 - stage] for stage in mine)
        step = max(ticks.activation[stage] for stage in mine)

        def rate(ways: Sequence[tuple[int, int]]) -> Fraction | None:
            """Return the most memory a tick, of (memory, ticks); None where it takes no time."""
            if any(size and not length for size, length in ways):
                return None
            return max((Fraction(size, length) for size, length in ways if size), default=None)

        size, held = ticks.activation, ticks.retained
        up = rate([(size[s], ticks.forward[s]) for s in mine])
        back = rate([(size[s], ticks.backward_input[s]) for s in mine])
        both = rate([(size[s], ticks.backward_input[s] + ticks.backward_weight[s]) for s in mine])
        last = rate([(held[s], ticks.backward_weight[s]) for s in mine])
        any_down = None if both is None or (last is None and any(held)) else max(both, last or both)
        rise = _Slope(step, up)
        falls = [_Slope(step, both), _Slope(step, back, rest)]
        length = _least_room(max(0, known - first), whole, cap, rise, falls)
        return first + _least_room(length, whole + kept, cap, rise, [_Slope(step, any_down)])


class _Slope(NamedTuple):
    """Most memory at a distance from the first start, or from the last end.

    `step` at once where the distance is `after`, then `rate` a tick; no limit without a rate.
    """

    step: int
    rate: Fraction | None
    after: int = 0

    def reaches(self, cap: int) -> Fraction:
        """Return the distance at which the cap is reached."""
        if self.rate is None:
            return Fraction(self.after)
        return self.after + max(Fraction(0), (cap - self.step) / self.rate)

    def at(self, distance: Fraction) -> Fraction | None:
        """Return the most memory at a distance; None where nothing limits it."""
        if distance < self.after:
            return Fraction(0)
        return None if self.rate is None else self.step + self.rate * (distance - self.after)


def _least_room(known: int, need: int, cap: int, rise: _Slope, falls: Sequence[_Slope]) -> int:
    """Find the least length from `known` with room for `need`, by halves, as room only grows."""
    if not need or (known and _room(known, cap, rise, falls) >= need):
        return known
    low, high = known, 2 * known or 1
    while _room(high, cap, rise, falls) < need:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _room(middle, cap, rise, falls) < need:
            low = middle
        else:
            high = middle
    return high


def _room(length: int, cap: int, rise: _Slope, falls: Sequence[_Slope]) -> Fraction:
    """Integrate the least of the cap, the rise and the falls from 0 to `length`."""
    end = Fraction(length)
    lines = [(rise, False), *((fall, True) for fall in falls)]
    cuts = {Fraction(0), end}
    for slope, falling in lines:
        for point in (Fraction(slope.after), slope.reaches(cap)):
            cuts.add(end - point if falling else point)
    for fall in falls:
        for one, other in ((rise, fall), *((fall, each) for each in falls if each is not fall)):
            cuts |= _crossings(one, one is not rise, other, end)
    inside = sorted(cut for cut in cuts if 0 <= cut <= end)

    def most(at: Fraction) -> Fraction:
        found = Fraction(cap)
        for slope, falling in lines:
            limit = slope.at(end - at if falling else at)
            found = found if limit is None else min(found, limit)
        return found

    # Between two neighbouring cuts one straight line is the least: its middle is its mean.
    return sum(
        ((b - a) * most((a + b) / 2) for a, b in pairwise(inside)),
        Fraction(0),
    )


def _crossings(one: _Slope, one_falls: bool, other: _Slope, end: Fraction) -> set[Fraction]:
    """Find where a line meets one that falls, as distances from the first start."""
    if one.rate is None or other.rate is None:
        return set()
    # one: a + b·t; other: c - d·t, with t the distance from the first start.
    a = one.step + one.rate * ((end - one.after) if one_falls else -one.after)
    b = -one.rate if one_falls else one.rate
    c, d = other.step + other.rate * (end - other.after), other.rate
    return set() if b + d == 0 else {(c - a) / (b + d)}


def _one_machine(jobs: Sequence[_Job]) -> int:
    """Compute the least makespan of a machine that may interrupt its jobs: longest tail first."""
    waiting = sorted(jobs)
    ready: list[list[int]] = []
    now = bound = index = 0
    while index < len(waiting) or ready:
        if not ready:
            now = max(now, waiting[index][0])
        while index < len(waiting) and waiting[index][0] <= now:
            heappush(ready, [-waiting[index][2], waiting[index][1]])
            index += 1
        job = ready[0]
        until = now + job[1]
        if index < len(waiting) and waiting[index][0] < until:
            job[1] -= waiting[index][0] - now
            now = waiting[index][0]
            continue
        heappop(ready)
        now = until
        bound = max(bound, now - job[0])
    return bound
