"""The list scheduler: whenever a rank is free it starts the ready computation of least key.

Keys are due times: microbatch i of a stage is due a period after microbatch i - 1, so a policy is
the due times of microbatch 0, and the same small policy fits any number of microbatches. Backwards
of weights wait in a queue and fill time in which nothing else is ready, or make room when memory
is full. A forward starts only if enough memory is left for one microbatch in each later stage of
the same rank; so the most advanced microbatch can always go on and no policy can deadlock.
"""

from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from heapq import heappop, heappush

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.construction.problem import Arrangement, ListPolicy, Operation, Problem

_F, _I, _W = 0, 1, 2
_NEVER = 1 << 200


def arrange(problem: Problem, policy: ListPolicy, *, limit: int | None = None) -> Arrangement:
    """Schedule `problem` by `policy`.

    Args:
        problem: What is to be scheduled.
        policy: How to choose.
        limit: Give up as soon as the makespan is sure to reach so many ticks.

    Raises:
        ScheduleError: a cap is below what one microbatch needs, the policy's order does not fit
            into the caps or waits for itself, or the limit is reached.
    """
    for rank, cap in enumerate(problem.caps):
        problem.check_cap(rank, Fraction(cap, problem.ticks.memory_per_unit))
    run = _ListScheduler(problem, policy, _NEVER if limit is None else limit)
    run.run()
    for rank, row in enumerate(run.rows):
        if len(row) < 3 * problem.microbatches * len(run.mine[rank]):
            raise ScheduleError(f"rank {rank} cannot keep the order after {len(row)} actions")
    return Arrangement(
        rows=tuple(map(tuple, run.rows)), makespan=max(run.free), peaks=tuple(run.peak)
    )


class _Head:
    """The next forward, or the next backward of inputs, of one stage."""

    __slots__ = (
        "after", "arrived", "delay", "due", "frees", "kind", "length", "link", "need", "number",
        "rank", "stage",
    )  # fmt: skip

    def __init__(self, problem: Problem, policy: ListPolicy, kind: int, stage: int) -> None:
        ticks, self.kind, self.stage, self.number = problem.ticks, kind, stage, 0
        self.rank = problem.placement[stage]
        self.length = problem.lengths[kind][stage]
        self.due = (policy.backward if kind else policy.forward)[stage]
        """When the next microbatch is due."""
        later = [s for s in range(stage + 1, ticks.stages) if problem.placement[s] == self.rank]
        reserve = 0 if policy.order else sum(ticks.activation[s] for s in later)
        self.need = ticks.activation[stage] + reserve
        """Memory without which a forward may not start."""
        self.frees = ticks.activation[stage] - ticks.retained[stage]
        """Memory that a backward gives back."""
        self.arrived: list[int] = [0] * problem.microbatches if not kind and not stage else []
        """When the input of the n-th microbatch is there."""
        self.after: _Head | None = None
        """What uses the result, `delay` ticks later, over `link` if it is on another rank."""
        self.link: tuple[int, int] | None = None
        self.delay = 0


class _ListScheduler:
    """State of one run of the list scheduler."""

    def __init__(self, problem: Problem, policy: ListPolicy, limit: int) -> None:
        ticks, self.policy, self.limit = problem.ticks, policy, limit
        self.caps, ranks, stages = problem.caps, problem.ranks, range(problem.ticks.stages)
        self.latency, self.period = ticks.latency, policy.period
        self.activation, self.retained = ticks.activation, ticks.retained
        self.weight_length = ticks.backward_weight
        delay = policy.weight_delay
        self.weight_due = [_NEVER if delay is None else delay + due for due in policy.backward]
        self.mine: list[list[int]] = [[] for _ in range(ranks)]
        for stage, rank in enumerate(problem.placement):
            self.mine[rank].append(stage)
        heads = [[_Head(problem, policy, kind, stage) for stage in stages] for kind in (_F, _I)]
        self.heads = heads
        for head in (*heads[_F], *heads[_I]):
            self._connect(head, problem)
        self.choices = [[heads[kind][s] for s in row for kind in (_I, _F)] for row in self.mine]
        self.weights: list[deque[Operation]] = [deque() for _ in range(ranks)]
        self.rows: list[list[Operation]] = [[] for _ in range(ranks)]
        self.free, self.held, self.peak = [0] * ranks, [0] * ranks, [0] * ranks
        self.left = [problem.microbatches * sum(map(ticks.work, row)) for row in self.mine]
        """Ticks that each rank has yet to compute."""
        self.links: dict[tuple[int, int], int] = {}
        alone = [[(head,) for head in row] for row in heads]
        self.order = [
            [alone[kind][stage] for kind, stage, _ in row if kind != _W]
            for row in policy.order or ()
        ]
        self.done = [0] * ranks
        self.wake = [_NEVER] * ranks
        self.events: list[tuple[int, int]] = []

    def _connect(self, head: _Head, problem: Problem) -> None:
        """Note what uses the result, and how far away it is."""
        stage, last = head.stage, len(problem.placement) - 1
        if head.kind == _F:
            head.after = self.heads[_F][stage + 1] if stage < last else self.heads[_I][stage]
        elif stage:
            head.after = self.heads[_I][stage - 1]
        if head.after is not None and head.after.rank != head.rank:
            head.link = head.rank, head.after.rank
            head.delay = problem.ticks.transfer[min(stage, head.after.stage)]

    def run(self) -> None:
        events, wake = self.events, self.wake
        for rank in range(len(self.mine)):
            self.call(rank, 0)
        while events:
            time, rank = heappop(events)
            if wake[rank] == time:
                wake[rank] = _NEVER
                self.decide(rank, time)

    def call(self, rank: int, time: int) -> None:
        """Let `rank` decide at `time`, or when it is free."""
        if time < self.free[rank]:
            time = self.free[rank]
        if time < self.wake[rank]:
            self.wake[rank] = time
            heappush(self.events, (time, rank))

    def decide(self, rank: int, now: int) -> None:
        best = coming = coming_key = _NEVER
        choice: _Head | None = None
        starved = False
        room, soon = self.caps[rank] - self.held[rank], now + self.policy.patience
        for head in self.candidates(rank):
            if head.number >= len(head.arrived):
                continue
            time = head.arrived[head.number]
            if head.kind == _F and head.need > room:
                starved = starved or time <= now
            elif time > now:
                if time < coming:
                    coming = time
                if time <= soon and head.due < coming_key:
                    coming_key = head.due
            elif head.due < best:
                best, choice = head.due, head
        queue = self.weights[rank]
        if queue and (choice is None or queue[0][0] < best):
            length = self.weight_length[queue[0][1]]
            if choice or starved or now + length <= coming + self.policy.weight_overrun:
                self.start_weight(rank, now, length)
                return
        if choice is not None and not (choice.kind == _F and coming_key < best):
            self.done[rank] += 1
            self.start(choice, now)
        elif coming < _NEVER:
            self.call(rank, coming)

    def candidates(self, rank: int) -> Sequence[_Head]:
        """Return what `rank` may choose among."""
        if not self.order:
            return self.choices[rank]
        row, done = self.order[rank], self.done[rank]
        return row[done] if done < len(row) else ()

    def start(self, head: _Head, now: int) -> None:
        rank, stage, number, end = head.rank, head.stage, head.number, now + head.length
        self.rows[rank].append((head.kind, stage, number))
        head.number = number + 1
        head.due += self.period
        if head.kind == _F:
            self.held[rank] += self.activation[stage]
            if self.held[rank] > self.peak[rank]:
                self.peak[rank] = self.held[rank]
        else:
            self.held[rank] -= head.frees
            due = self.weight_due[stage] + self.period * number
            self.weights[rank].append((due, stage, number))
        if head.after is not None:
            self.deliver(head, head.after, end)
        self.occupy(rank, head.length, end)

    def start_weight(self, rank: int, now: int, length: int) -> None:
        _, stage, number = self.weights[rank].popleft()
        self.rows[rank].append((_W, stage, number))
        self.held[rank] -= self.retained[stage]
        self.occupy(rank, length, now + length)

    def occupy(self, rank: int, length: int, end: int) -> None:
        """Let `rank` compute until `end`, and decide then."""
        self.free[rank] = end
        self.left[rank] -= length
        if end + self.left[rank] >= self.limit:
            raise ScheduleError(f"rank {rank} cannot end before {self.limit} ticks")
        self.call(rank, end)

    def deliver(self, head: _Head, after: _Head, end: int) -> None:
        if head.link is not None:
            end = max(end, self.links.get(head.link, 0)) + head.delay
            self.links[head.link] = end
            end += self.latency
        after.arrived.append(end)
        self.call(after.rank, end)
