"""Simulates rows of computations with given durations, in order of their end times.

The transport is asynchronous: a message leaves when its computation has ended and the link between
the two ranks is free, occupies the link for its transfer time, and arrives a latency later.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.costs import Ticks

Result = tuple[bool, int, int]
"""(is a gradient, stage whose output or input gradient it is, microbatch)."""


class Span(NamedTuple):
    """A computation on the timeline; times in ticks."""

    action: Action
    start: int
    end: int
    cause: tuple[int, int] | None
    """(rank, index) of the span whose end or message determined this span's start."""


def sources(action: Action, stages: int) -> tuple[Result, ...]:
    """Results of other computations that a computation needs."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return ((False, stage - 1, microbatch),) if stage > 0 else ()
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and stage < stages - 1:
        return ((True, stage + 1, microbatch),)
    return ()


def results(action: Action) -> list[Result]:
    """Results of a computation, or of both of a pair, for other computations."""
    return [
        (part.kind is not Kind.FORWARD, part.stage, part.microbatch)
        for part in action.computations
        if part.kind is not Kind.BACKWARD_WEIGHT
    ]


def _duration(action: Action, ticks: Ticks) -> int:
    """Ticks that an action computes; the two of a pair run one after the other."""
    length = 0
    for part in action.computations:
        if part.kind is Kind.FORWARD:
            length += ticks.forward[part.stage]
        if part.kind is Kind.BACKWARD_INPUT or part.kind is Kind.BACKWARD:
            length += ticks.backward_input[part.stage]
        if part.kind is Kind.BACKWARD_WEIGHT or part.kind is Kind.BACKWARD:
            length += ticks.backward_weight[part.stage]
    return length


class EventSimulation:
    """Simulation of all rows; `run` returns when they have ended or deadlock.

    Args:
        rows: computations of each rank, in order.
        placement: rank of each stage.
        ticks: durations.
        on_end: called with (rank, action) at the end of each computation, in order of time.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[Action]],
        placement: Sequence[int],
        ticks: Ticks,
        on_end: Callable[[int, Action], None] | None = None,
    ) -> None:
        self.rows, self.placement, self.ticks, self.on_end = rows, placement, ticks, on_end
        self.spans: list[list[Span]] = [[] for _ in rows]
        self.arrival: dict[Result, tuple[int, int, int]] = {}
        """Arrival time of each result, and rank and index of the span that produced it."""
        self.link_free: dict[tuple[int, int], int] = {}
        self.waiting_rank: dict[Result, int] = {}
        """Rank that waits for each result."""

    def run(self) -> list[int]:
        """Simulate the rows; return the ranks that are stuck."""
        running: list[tuple[int, int, int, Span]] = []
        """(end, start, rank, span) of the current computation of each rank."""
        ready_ranks = list(range(len(self.rows)))
        while ready_ranks or running:
            for rank in ready_ranks:
                if (span := self._next(rank)) is not None:
                    # Ordered by end; start and rank break ties, so the order is deterministic.
                    heappush(running, (span.end, span.start, rank, span))
            if not running:
                break
            end, _, rank, span = heappop(running)
            index = len(self.spans[rank])
            self.spans[rank].append(span)
            if self.on_end is not None:
                self.on_end(rank, span.action)
            # This rank is free again, and each result may wake a rank that waited for it.
            ready_ranks = [rank]
            for result in results(span.action):
                self._deliver(result, end, rank, index)
                if (woken := self.waiting_rank.pop(result, None)) is not None:
                    ready_ranks.append(woken)
        return [r for r, row in enumerate(self.rows) if len(self.spans[r]) < len(row)]

    def missing(self, rank: int) -> Result:
        """Return the result that the next computation of `rank` waits for."""
        action = self.rows[rank][len(self.spans[rank])]
        needed = (s for part in action.computations for s in sources(part, len(self.placement)))
        return next(source for source in needed if source not in self.arrival)

    def _next(self, rank: int) -> Span | None:
        """Time the rank's next computation if its inputs are known, else register it as waiting."""
        spans, row = self.spans[rank], self.rows[rank]
        if len(spans) == len(row):
            return None
        action = row[len(spans)]
        start = spans[-1].end if spans else 0
        cause = (rank, len(spans) - 1) if spans else None
        for part in action.computations:
            for source in sources(part, len(self.placement)):
                if source not in self.arrival:
                    self.waiting_rank[source] = rank
                    return None
                time, *origin = self.arrival[source]
                # The latest input determines the start, unless the rank is busy until later.
                if time > start:
                    start, cause = time, (origin[0], origin[1])
        return Span(action, start, start + _duration(action, self.ticks), cause)

    def _deliver(self, result: Result, end: int, rank: int, index: int) -> None:
        """Set the time at which a result reaches its consumer."""
        is_gradient, stage, _ = result
        consumer = stage + (-1 if is_gradient else 1)
        if not 0 <= consumer < len(self.placement):
            return
        target = self.placement[consumer]
        if target != rank:
            transfer = self.ticks.transfer[min(stage, consumer)]
            # A link carries one message at a time in each direction.
            sent = max(end, self.link_free.get((rank, target), 0)) + transfer
            self.link_free[rank, target] = sent
            end = sent + self.ticks.latency
        self.arrival[result] = (end, rank, index)
