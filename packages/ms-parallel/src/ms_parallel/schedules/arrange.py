"""The list scheduler: whenever a rank is free it starts the ready computation of least key.

Keys are due times: microbatch i of a stage is due a period after microbatch i - 1, so a policy is
the due times of microbatch 0, and the same small policy fits any number of microbatches. Backwards
of weights wait in a queue and fill time in which nothing else is ready, or make room when memory
is full. A forward starts only if enough memory is left for one microbatch in each later stage of
the same rank; so the most advanced microbatch can always go on and no policy can deadlock.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from fractions import Fraction
from heapq import heappop, heappush

from attrs import field, frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.action import Action, Kind
from ms_parallel.schedules.costs import Ticks
from ms_parallel.schedules.table import Schedule

__all__ = ["Arrangement", "Policy", "Problem", "arrange"]

_F, _I, _W = 0, 1, 2
_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_NEVER = 1 << 200


def _integers(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@frozen(kw_only=True)
class Problem:
    """What is to be scheduled; times and memory in ticks."""

    ticks: Ticks
    placement: tuple[int, ...] = field(converter=_integers)
    microbatches: int
    caps: tuple[int, ...] = field(converter=_integers)
    """Most activation memory of each rank."""
    split: bool = True
    """False: backwards are whole; `ticks` then has their full time as that of inputs, and no time
    or memory for weights."""

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.caps)

    @property
    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Ticks of forwards, backwards of inputs and of weights, for each stage."""
        return self.ticks.forward, self.ticks.backward_input, self.ticks.backward_weight

    @property
    def longest_work(self) -> int:
        """Ticks that the busiest rank computes for one microbatch."""
        work = [0] * self.ranks
        for stage, rank in enumerate(self.placement):
            work[rank] += self.ticks.work(stage)
        return max(work)

    def check_cap(self, rank: int, cap: Fraction) -> None:
        """Refuse a cap, in the unit of the costs, in which `rank` cannot work.

        Raises:
            ScheduleError: with the least that works.
        """
        least = Fraction(self.least(rank), self.ticks.memory_per_unit)
        if cap < least:
            raise ScheduleError(
                f"rank {rank} cannot work in {float(cap):g} of activation memory; "
                f"the least that works is {float(least):g}"
            )

    def least(self, rank: int) -> int:
        """Memory without which `rank` cannot hold one microbatch in each of its stages."""
        return sum(
            size
            for size, home in zip(self.ticks.activation, self.placement, strict=True)
            if home == rank
        )


@frozen(kw_only=True)
class Policy:
    """How the list scheduler chooses; all times in ticks."""

    period: int
    """Due time between one microbatch and the next."""
    forward: tuple[int, ...]
    """For each stage the due time of microbatch 0's forward."""
    backward: tuple[int, ...]
    """For each stage the due time of microbatch 0's backward of inputs."""
    weight_delay: int | None = None
    """Time after its backward of inputs at which a backward of weights is due; None: never, it
    only fills idle time and makes room."""
    patience: int = 0
    """Time that a rank idles for a known message of smaller key rather than start a forward."""
    weight_overrun: int = 0
    """Time by which a filling backward of weights may delay a message that is known to come."""
    order: tuple[tuple[tuple[int, int, int], ...], ...] | None = None
    """For each rank its forwards and backwards of inputs, to be kept in this order whatever the
    keys; a row may hold backwards of weights, which are placed anew."""


@frozen(kw_only=True)
class Arrangement:
    """What the list scheduler made."""

    rows: tuple[tuple[tuple[int, int, int], ...], ...]
    """For each rank (0 forward, 1 backward of inputs, 2 of weights; stage; microbatch)."""
    makespan: int
    peaks: tuple[int, ...]

    def schedule(self, problem: Problem, name: str) -> Schedule:
        """The arrangement as a table with communication."""
        rows = [_actions(row, problem.split) for row in self.rows]
        return Schedule.from_computations(
            rows, problem.placement, problem.microbatches, name, problem.ticks
        )


def _actions(row: Sequence[tuple[int, int, int]], split: bool) -> list[Action]:
    """Actions with whole backwards, or with I and W joined to a B where no rank waits for the I."""
    if not split:
        kinds = (Kind.FORWARD, Kind.BACKWARD)
        return [Action(kinds[kind], stage, number) for kind, stage, number in row if kind != _W]
    fused: list[Action] = []
    for kind, stage, number in row:
        if kind == _W and stage == 0 and fused[-1] == (Kind.BACKWARD_INPUT, 0, number, ()):
            fused[-1] = Action(Kind.BACKWARD, 0, number)
        else:
            fused.append(Action(_KINDS[kind], stage, number))
    return fused


def arrange(problem: Problem, policy: Policy) -> Arrangement:
    """Schedule `problem` by `policy`.

    Raises:
        ScheduleError: a cap is below what one microbatch needs, or the policy's order does not
            fit into the caps or waits for itself.
    """
    for rank, cap in enumerate(problem.caps):
        problem.check_cap(rank, Fraction(cap, problem.ticks.memory_per_unit))
    desk = _Desk(problem, policy)
    desk.run()
    for rank, row in enumerate(desk.rows):
        if len(row) < 3 * problem.microbatches * len(desk.mine[rank]):
            raise ScheduleError(f"rank {rank} cannot keep the order after {len(row)} actions")
    return Arrangement(
        rows=tuple(map(tuple, desk.rows)), makespan=max(desk.free), peaks=tuple(desk.peak)
    )


class _Desk:
    """State of one run of the list scheduler."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        ticks, self.policy = problem.ticks, policy
        self.placement, self.count = problem.placement, problem.microbatches
        self.caps, self.stages, ranks = problem.caps, ticks.stages, problem.ranks
        self.duration = (ticks.forward, ticks.backward_input, ticks.backward_weight)
        self.transfer, self.latency = ticks.transfer, ticks.latency
        self.activation, self.retained = ticks.activation, ticks.retained
        self.mine: list[list[int]] = [[] for _ in range(ranks)]
        for stage, rank in enumerate(self.placement):
            self.mine[rank].append(stage)
        self.choices = [[(k, stage) for stage in row for k in (_I, _F)] for row in self.mine]
        self.reserve = [
            sum(self.activation[later] for later in self.mine[rank] if later > stage)
            for stage, rank in enumerate(self.placement)
        ]
        # arrivals[kind][stage][n]: when the input of the n-th microbatch is there.
        self.arrivals: list[list[list[int]]] = [[[] for _ in self.placement] for _ in range(2)]
        self.arrivals[_F][0] = [0] * self.count
        self.next = [[0] * self.stages for _ in range(2)]
        self.weights: list[deque[tuple[int, int, int]]] = [deque() for _ in range(ranks)]
        self.rows: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
        self.free, self.held, self.peak = [0] * ranks, [0] * ranks, [0] * ranks
        self.link_free: dict[tuple[int, int], int] = {}
        self.order = [[op for op in row if op[0] != _W] for row in policy.order or ()]
        self.done = [0] * ranks
        self.wake = [_NEVER] * ranks
        self.events: list[tuple[int, int]] = []

    def run(self) -> None:
        for rank in range(len(self.mine)):
            self.call(rank, 0)
        while self.events:
            time, rank = heappop(self.events)
            if self.wake[rank] == time:
                self.wake[rank] = _NEVER
                self.decide(rank, time)

    def call(self, rank: int, time: int) -> None:
        """Have `rank` decide at `time`, or when it is free."""
        time = max(time, self.free[rank])
        if time < self.wake[rank]:
            self.wake[rank] = time
            heappush(self.events, (time, rank))

    def decide(self, rank: int, now: int) -> None:
        policy = self.policy
        best, choice, coming, coming_key = _NEVER, (-1, -1), _NEVER, _NEVER
        starved = False
        for kind, stage in self.heads(rank):
            number = self.next[kind][stage]
            arrived = self.arrivals[kind][stage]
            if number >= len(arrived):
                continue
            due = policy.backward[stage] if kind == _I else policy.forward[stage]
            key = due + policy.period * number
            if kind == _F and not self.has_room(rank, stage):
                starved = starved or arrived[number] <= now
            elif arrived[number] > now:
                coming = min(coming, arrived[number])
                if arrived[number] <= now + policy.patience:
                    coming_key = min(coming_key, key)
            elif key < best:
                best, choice = key, (kind, stage)
        queue = self.weights[rank]
        if queue and (choice[0] < 0 or queue[0][0] < best):
            length = self.duration[_W][queue[0][1]]
            if choice[0] >= 0 or starved or now + length <= coming + policy.weight_overrun:
                _, stage, number = queue.popleft()
                self.start(rank, _W, stage, number, now)
                return
        if choice[0] == _F and coming_key < best:
            self.call(rank, coming)
        elif choice[0] >= 0:
            kind, stage = choice
            number = self.next[kind][stage]
            self.next[kind][stage] += 1
            self.done[rank] += 1
            self.start(rank, kind, stage, number, now)
        elif coming < _NEVER:
            self.call(rank, coming)

    def heads(self, rank: int) -> Sequence[tuple[int, int]]:
        """The computations (kind, stage) among which `rank` may choose."""
        if not self.order:
            return self.choices[rank]
        row, done = self.order[rank], self.done[rank]
        return (row[done][:2],) if done < len(row) else ()

    def has_room(self, rank: int, stage: int) -> bool:
        need = self.held[rank] + self.activation[stage]
        if not self.order:
            need += self.reserve[stage]
        return need <= self.caps[rank]

    def start(self, rank: int, kind: int, stage: int, number: int, now: int) -> None:
        self.rows[rank].append((kind, stage, number))
        end = now + self.duration[kind][stage]
        if kind == _F:
            self.held[rank] += self.activation[stage]
            self.peak[rank] = max(self.peak[rank], self.held[rank])
            if stage + 1 < self.stages:
                self.deliver(rank, stage, stage + 1, _F, end)
            else:
                self.arrivals[_I][stage].append(end)
        elif kind == _I:
            self.held[rank] -= self.activation[stage] - self.retained[stage]
            delay = self.policy.weight_delay
            due = _NEVER if delay is None else delay + self.policy.backward[stage]
            self.weights[rank].append((due + self.policy.period * number, stage, number))
            if stage > 0:
                self.deliver(rank, stage, stage - 1, _I, end)
        else:
            self.held[rank] -= self.retained[stage]
        self.free[rank] = end
        self.call(rank, end)

    def deliver(self, rank: int, source: int, consumer: int, kind: int, end: int) -> None:
        target = self.placement[consumer]
        if target != rank:
            sent = max(end, self.link_free.get((rank, target), 0))
            sent += self.transfer[min(source, consumer)]
            self.link_free[rank, target] = sent
            end = sent + self.latency
        self.arrivals[kind][consumer].append(end)
        self.call(target, end)
