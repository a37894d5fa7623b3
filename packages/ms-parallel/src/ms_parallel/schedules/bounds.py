"""Makespans that no schedule can beat, whatever its order.

Two arguments, the larger counts. A rank cannot finish before its work fits between the earliest
moments at which its inputs can exist and the least time that others need after its outputs: the
preemptive one-machine schedule with heads and tails (Jackson's rule) is a relaxation solved
exactly. And a rank's memory times time is at least what its microbatches occupy on their shortest
way from forward to backward, so a cap forces a length.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from ms_parallel.schedules.arrange import Problem

__all__ = ["lower_bound"]

_Job = tuple[int, int, int]
"""(earliest start, length, least time from its end to the end of everything)."""


def lower_bound(problem: Problem) -> int:
    """Ticks below which no schedule of `problem` can stay."""
    ways = _Ways(problem)
    return max(
        max(_one_machine(ways.jobs(rank)), ways.memory(rank)) for rank in range(problem.ranks)
    )


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
        """Everything that a rank computes, with heads and tails.

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

    def memory(self, rank: int) -> int:
        """Earliest end if the rank's memory is full from its first forward on."""
        ticks, cap = self.problem.ticks, self.problem.caps[rank]
        area, first = 0, None
        for stage, home in enumerate(self.problem.placement):
            if home == rank:
                step = 2 * ticks.stages - 1 - stage
                alive = self.starts[step] + self.lengths[step] - self.starts[stage]
                area += alive * ticks.activation[stage]
                area += ticks.backward_weight[stage] * ticks.retained[stage]
                first = self.starts[stage] if first is None else first
        if not cap:
            return 0
        return (first or 0) - (-area * self.problem.microbatches // cap)


def _one_machine(jobs: Sequence[_Job]) -> int:
    """Least makespan of one machine that may interrupt its jobs: longest tail first."""
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
