"""List scheduler: a free rank starts the ready computation with the smallest key.

Keys are due times. Microbatch i of a stage is due one period after microbatch i - 1, so a policy
consists of the due times of microbatch 0 and fits any number of microbatches. Weight backwards wait
in a queue and fill time in which nothing else is ready, or free memory when it is full. A forward
starts only if enough memory remains for one microbatch in every later stage of the same rank, so
the most advanced microbatch can always proceed and no policy can deadlock.
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
        problem: scheduling problem.
        policy: policy.
        limit: give up as soon as the makespan must reach this number of ticks.

    Raises:
        ScheduleError: a memory cap is too small for one microbatch, the policy's order deadlocks or
            exceeds a cap, or the limit is reached.
    """
    for rank, cap in enumerate(problem.caps):
        problem.check_cap(rank, Fraction(cap, problem.ticks.memory_per_unit))
    scheduler = _ListScheduler(problem, policy, _NEVER if limit is None else limit)
    scheduler.run()
    for rank, row in enumerate(scheduler.rows):
        # An order that deadlocks or exceeds a cap leaves its rank stuck before the end.
        if len(row) < 3 * problem.microbatches * len(scheduler.stages_by_rank[rank]):
            raise ScheduleError(f"rank {rank} cannot keep the order after {len(row)} actions")
    return Arrangement(
        rows=tuple(map(tuple, scheduler.rows)),
        makespan=max(scheduler.free),
        peaks=tuple(scheduler.peak),
    )


class _Head:
    """Next forward, or next input backward, of a stage."""

    __slots__ = (
        "arrived", "consumer", "delay", "due", "freed", "length", "link", "need", "number",
        "phase", "rank", "stage",
    )  # fmt: skip

    def __init__(self, problem: Problem, policy: ListPolicy, phase: int, stage: int) -> None:
        ticks, self.phase, self.stage, self.number = problem.ticks, phase, stage, 0
        self.rank = problem.placement[stage]
        self.length = problem.lengths[phase][stage]
        self.due = (policy.backward if phase else policy.forward)[stage]
        """Due time of the next microbatch."""
        later_stages = [
            s for s in range(stage + 1, ticks.stages) if problem.placement[s] == self.rank
        ]
        # Room for this microbatch in the rank's later stages, without which it could not finish.
        reserve = 0 if policy.order else sum(ticks.activation[s] for s in later_stages)
        self.need = ticks.activation[stage] + reserve
        """Free memory that is required to start a forward."""
        self.freed = ticks.activation[stage] - ticks.retained[stage]
        """Memory freed by a backward."""
        self.arrived: list[int] = [0] * problem.microbatches if not phase and not stage else []
        """Arrival time of the input of each microbatch."""
        self.consumer: _Head | None = None
        """Head that consumes the result `delay` ticks later, over `link` if on another rank."""
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
        self.stages_by_rank: list[list[int]] = [[] for _ in range(ranks)]
        for stage, rank in enumerate(problem.placement):
            self.stages_by_rank[rank].append(stage)
        heads = [[_Head(problem, policy, phase, stage) for stage in stages] for phase in (_F, _I)]
        self.heads = heads
        for head in (*heads[_F], *heads[_I]):
            self._connect(head, problem)
        self.heads_by_rank = [
            [heads[phase][s] for s in row for phase in (_I, _F)] for row in self.stages_by_rank
        ]
        self.weights: list[deque[Operation]] = [deque() for _ in range(ranks)]
        self.rows: list[list[Operation]] = [[] for _ in range(ranks)]
        self.free, self.memory, self.peak = [0] * ranks, [0] * ranks, [0] * ranks
        self.remaining = [
            problem.microbatches * sum(map(ticks.work, row)) for row in self.stages_by_rank
        ]
        """Ticks that each rank still has to compute."""
        self.links: dict[tuple[int, int], int] = {}
        # Candidates under a fixed order: one-element tuples, built once for speed.
        single = [[(head,) for head in row] for row in heads]
        self.order = [
            [single[phase][stage] for phase, stage, _ in row if phase != _W]
            for row in policy.order or ()
        ]
        self.done = [0] * ranks
        self.wake = [_NEVER] * ranks
        self.events: list[tuple[int, int]] = []

    def _connect(self, head: _Head, problem: Problem) -> None:
        """Set the consumer of the result and its delay."""
        stage, last = head.stage, len(problem.placement) - 1
        if head.phase == _F:
            head.consumer = self.heads[_F][stage + 1] if stage < last else self.heads[_I][stage]
        elif stage:
            head.consumer = self.heads[_I][stage - 1]
        if head.consumer is not None and head.consumer.rank != head.rank:
            head.link = head.rank, head.consumer.rank
            head.delay = problem.ticks.transfer[min(stage, head.consumer.stage)]

    def run(self) -> None:
        events, wake = self.events, self.wake
        for rank in range(len(self.stages_by_rank)):
            self.call(rank, 0)
        while events:
            time, rank = heappop(events)
            # Skip an event that an earlier one has replaced.
            if wake[rank] == time:
                wake[rank] = _NEVER
                self.decide(rank, time)

    def call(self, rank: int, time: int) -> None:
        """Let `rank` decide at `time`, or once it is free."""
        if time < self.free[rank]:
            time = self.free[rank]
        if time < self.wake[rank]:
            self.wake[rank] = time
            heappush(self.events, (time, rank))

    def decide(self, rank: int, time: int) -> None:
        best_key = next_arrival = next_key = _NEVER
        choice: _Head | None = None
        blocked = False
        free_memory, deadline = self.caps[rank] - self.memory[rank], time + self.policy.patience
        for head in self.candidates(rank):
            if head.number >= len(head.arrived):
                continue
            arrival = head.arrived[head.number]
            # Out of memory: a pending weight backward may free some first.
            if head.phase == _F and head.need > free_memory:
                blocked = blocked or arrival <= time
            # Not ready: note the next arrival, and the most urgent head that arrives within
            # patience.
            elif arrival > time:
                if arrival < next_arrival:
                    next_arrival = arrival
                if arrival <= deadline and head.due < next_key:
                    next_key = head.due
            elif head.due < best_key:
                best_key, choice = head.due, head
        queue = self.weights[rank]
        # A weight backward runs if it is due first, if memory is full, or if it fills an idle gap.
        if queue and (choice is None or queue[0][0] < best_key):
            length = self.weight_length[queue[0][1]]
            if choice or blocked or time + length <= next_arrival + self.policy.weight_overrun:
                self.start_weight(rank, time, length)
                return
        # Idle instead of starting a forward if a more urgent message is about to arrive.
        if choice is not None and not (choice.phase == _F and next_key < best_key):
            self.done[rank] += 1
            self.start(choice, time)
        elif next_arrival < _NEVER:
            self.call(rank, next_arrival)

    def candidates(self, rank: int) -> Sequence[_Head]:
        """Return the heads that `rank` may start."""
        if not self.order:
            return self.heads_by_rank[rank]
        row, done = self.order[rank], self.done[rank]
        return row[done] if done < len(row) else ()

    def start(self, head: _Head, time: int) -> None:
        rank, stage, number, end = head.rank, head.stage, head.number, time + head.length
        self.rows[rank].append((head.phase, stage, number))
        head.number = number + 1
        # Microbatch i + 1 is due one period after microbatch i.
        head.due += self.period
        if head.phase == _F:
            self.memory[rank] += self.activation[stage]
            if self.memory[rank] > self.peak[rank]:
                self.peak[rank] = self.memory[rank]
        else:
            self.memory[rank] -= head.freed
            due = self.weight_due[stage] + self.period * number
            self.weights[rank].append((due, stage, number))
        if head.consumer is not None:
            self.deliver(head, head.consumer, end)
        self.occupy(rank, head.length, end)

    def start_weight(self, rank: int, time: int, length: int) -> None:
        _, stage, number = self.weights[rank].popleft()
        self.rows[rank].append((_W, stage, number))
        self.memory[rank] -= self.retained[stage]
        self.occupy(rank, length, time + length)

    def occupy(self, rank: int, length: int, end: int) -> None:
        """Mark `rank` as busy until `end`, when it decides again."""
        self.free[rank] = end
        self.remaining[rank] -= length
        # Even without further idle time this rank would end too late.
        if end + self.remaining[rank] >= self.limit:
            raise ScheduleError(f"rank {rank} cannot finish before {self.limit} ticks")
        self.call(rank, end)

    def deliver(self, head: _Head, consumer: _Head, end: int) -> None:
        if head.link is not None:
            # A link carries one message at a time.
            end = max(end, self.links.get(head.link, 0)) + head.delay
            self.links[head.link] = end
            end += self.latency
        consumer.arrived.append(end)
        self.call(consumer.rank, end)
