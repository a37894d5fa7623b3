"""Plays a schedule with given costs, exactly: when each action runs, what is idle and why.

The transport is asynchronous: a message leaves when its computation ends and the link between the
two ranks is free, occupies the link for size / bandwidth, and arrives a latency later. Times are
integers (`Ticks`), so that nothing is rounded.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from attrs import evolve, frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.communication import sources
from ms_parallel.schedules.table.costs import Costs, Number, Ticks, exact
from ms_parallel.schedules.table.schedule import Schedule

__all__ = ["Span", "Timeline", "measured", "simulate"]


class Span(NamedTuple):
    """One computation on the timeline; times in ticks."""

    action: Action
    start: int
    end: int
    cause: tuple[int, int] | None
    """(rank, index) of the span whose end, or whose message, set this one's start."""


@frozen(kw_only=True)
class Timeline:
    """What `simulate` found. Fractions are in the units of the costs."""

    schedule: Schedule
    ticks: Ticks
    spans: tuple[tuple[Span, ...], ...]
    """For each rank its computations in order."""
    peak_memory: tuple[Fraction, ...]
    """For each rank the most activation memory that it holds at once."""

    @property
    def makespan(self) -> Fraction:
        """Time from the first start to the last end."""
        return Fraction(self.end, self.ticks.per_unit)

    @property
    def end(self) -> int:
        """The last end, in ticks."""
        return max(row[-1].end for row in self.spans if row)

    @property
    def busy(self) -> tuple[Fraction, ...]:
        """For each rank the time that it computes."""
        return tuple(
            Fraction(sum(span.end - span.start for span in row), self.ticks.per_unit)
            for row in self.spans
        )

    @property
    def bubble(self) -> Fraction:
        """Share of all ranks' time, up to the makespan, in which they compute nothing."""
        whole = self.makespan * len(self.spans)
        return 1 - sum(self.busy) / whole if whole else Fraction(0)

    @property
    def lost(self) -> Fraction:
        """Makespan beyond the work of the busiest rank: what closed formulas call the bubble."""
        return self.makespan - max(self.busy)

    @property
    def lost_in_span(self) -> Fraction:
        """Most idle time of a rank between its own first start and last end.

        This is what is lost where a rank may begin the next step before others end this one, as
        the zero-bubble schedules do by validating the optimizer's step afterwards.
        """
        idle = [
            row[-1].end - row[0].start - sum(span.end - span.start for span in row)
            for row in self.spans
            if row
        ]
        return Fraction(max(idle), self.ticks.per_unit)

    @property
    def critical_path(self) -> tuple[tuple[int, Span], ...]:
        """A chain of (rank, span) from time 0 to the makespan that explains it, in order."""
        _, rank = max((row[-1].end, rank) for rank, row in enumerate(self.spans) if row)
        at: tuple[int, int] | None = (rank, len(self.spans[rank]) - 1)
        path = []
        while at is not None:
            span = self.spans[at[0]][at[1]]
            path.append((at[0], span))
            at = span.cause
        return tuple(reversed(path))


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Play `schedule` with `costs`.

    Raises:
        ScheduleError: the costs are of another number of stages, or the schedule deadlocks.
    """
    if costs.stages != schedule.stages:
        raise ScheduleError(
            f"costs of {costs.stages} stages for a schedule of {schedule.stages}; "
            "give one entry a stage"
        )
    ticks = costs.ticks()
    rows = schedule.computations()
    return Timeline(
        schedule=schedule,
        ticks=ticks,
        spans=_play(rows, schedule.placement, ticks),
        peak_memory=tuple(Fraction(_peak(row, ticks), ticks.memory_per_unit) for row in rows),
    )


def measured(
    schedule: Schedule, times: Sequence[Sequence[tuple[Number, Number]]], costs: Costs | None = None
) -> Timeline:
    """The timeline of a real run, to be held against a simulated one.

    Args:
        schedule: What was run.
        times: For each rank (start, end) of each of its computations in order, on one clock; the
            first start of all becomes 0.
        costs: Where the memory of activations comes from; default one a microbatch and stage.

    Raises:
        ScheduleError: the times are not those of this schedule's computations.
    """
    rows = schedule.computations()
    if [len(row) for row in rows] != [len(row) for row in times]:
        raise ScheduleError(
            f"measured {[len(row) for row in times]} computations a rank, but the schedule has "
            f"{[len(row) for row in rows]}; measure every one of them"
        )
    flat = [exact(time) for row in times for pair in row for time in pair]
    per_unit, first = lcm(*(time.denominator for time in flat)), min(flat)
    ticks = (costs or Costs.uniform(schedule.stages)).ticks()
    begun = [[int((exact(pair[0]) - first) * per_unit) for pair in row] for row in times]
    ended = [[int((exact(pair[1]) - first) * per_unit) for pair in row] for row in times]
    where = {
        (part.kind is not Kind.FORWARD, part.stage, part.microbatch): (rank, index)
        for rank, row in enumerate(rows)
        for index, action in enumerate(row)
        for part in action.computations
        if part.kind is not Kind.BACKWARD_WEIGHT
    }

    def cause(rank: int, index: int) -> tuple[int, int] | None:
        """What ended last of all that the action waited for."""
        needs = [
            where[source]
            for part in rows[rank][index].computations
            for source in sources(part, schedule.stages)
        ]
        needs += [(rank, index - 1)] if index else []
        return max(needs, key=lambda at: ended[at[0]][at[1]], default=None)

    return Timeline(
        schedule=schedule,
        ticks=evolve(ticks, per_unit=per_unit),
        spans=tuple(
            tuple(
                Span(action, begun[rank][index], ended[rank][index], cause(rank, index))
                for index, action in enumerate(row)
            )
            for rank, row in enumerate(rows)
        ),
        peak_memory=tuple(Fraction(_peak(row, ticks), ticks.memory_per_unit) for row in rows),
    )


class _Player:
    """The state of one simulation; `advance` runs a rank as far as its inputs allow."""

    def __init__(
        self, rows: Sequence[Sequence[Action]], placement: Sequence[int], ticks: Ticks
    ) -> None:
        self.rows, self.placement, self.ticks = rows, placement, ticks
        self.spans: list[list[Span]] = [[] for _ in rows]
        self.arrival: dict[tuple[bool, int, int], tuple[int, int, int]] = {}
        self.link_free: dict[tuple[int, int], int] = {}
        self.waiting: dict[tuple[bool, int, int], int] = {}

    def advance(self, rank: int) -> list[int]:
        """Run `rank` until it waits; return the ranks that were woken."""
        woken: list[int] = []
        spans, row = self.spans[rank], self.rows[rank]
        while len(spans) < len(row):
            action = row[len(spans)]
            start = spans[-1].end if spans else 0
            cause = (rank, len(spans) - 1) if spans else None
            for part in action.computations:
                for source in sources(part, len(self.placement)):
                    if source not in self.arrival:
                        self.waiting[source] = rank
                        return woken
                    time, *origin = self.arrival[source]
                    if time > start:
                        start, cause = time, (origin[0], origin[1])
            end = start + self.ticks.duration(action)
            spans.append(Span(action, start, end, cause))
            for part in action.computations:
                if part.kind is not Kind.BACKWARD_WEIGHT:
                    self._deliver(part, end, rank, len(spans) - 1, woken)
        return woken

    def _deliver(self, part: Action, end: int, rank: int, index: int, woken: list[int]) -> None:
        backward = part.kind is not Kind.FORWARD
        consumer = part.stage + (-1 if backward else 1)
        if not 0 <= consumer < len(self.placement):
            return
        target = self.placement[consumer]
        if target != rank:
            transfer = self.ticks.transfer[consumer if backward else part.stage]
            sent = max(end, self.link_free.get((rank, target), 0)) + transfer
            self.link_free[rank, target] = sent
            end = sent + self.ticks.latency
        result = (backward, part.stage, part.microbatch)
        self.arrival[result] = (end, rank, index)
        if (sleeper := self.waiting.pop(result, None)) is not None and sleeper != rank:
            woken.append(sleeper)


def _play(
    rows: Sequence[Sequence[Action]], placement: Sequence[int], ticks: Ticks
) -> tuple[tuple[Span, ...], ...]:
    player = _Player(rows, placement, ticks)
    pending = list(range(len(rows)))
    while pending:
        pending += player.advance(pending.pop())
    for rank, row in enumerate(rows):
        done = len(player.spans[rank])
        if done < len(row):
            raise ScheduleError(
                f"rank {rank} never gets what {row[done]} needs; run verify on this schedule "
                "to see where it deadlocks"
            )
    return tuple(map(tuple, player.spans))


def _peak(row: Sequence[Action], ticks: Ticks) -> int:
    held = peak = 0
    for action in row:
        for part in action.computations:
            if part.kind is Kind.FORWARD:
                held += ticks.activation[part.stage]
        peak = max(peak, held)
        for part in action.computations:
            if part.kind is Kind.BACKWARD:
                held -= ticks.activation[part.stage]
            elif part.kind is Kind.BACKWARD_INPUT:
                held -= ticks.activation[part.stage] - ticks.retained[part.stage]
            elif part.kind is Kind.BACKWARD_WEIGHT:
                held -= ticks.retained[part.stage]
    return peak
