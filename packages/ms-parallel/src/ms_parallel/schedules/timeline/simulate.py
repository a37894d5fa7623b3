"""Exact simulation of a schedule with given costs: when each action runs, and idle time.

Messages behave as in `EventSimulation`. The two actions of a pair run one after the other, as in
our runtime, so pairs bring no gain. Times are integers (`Ticks`), so nothing is rounded.
"""

from collections.abc import Sequence
from fractions import Fraction

from attrs import frozen

from ms_parallel.arguments import check_type
from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.costs import Costs, Ticks
from ms_parallel.schedules.table.event_simulation import EventSimulation, Span
from ms_parallel.schedules.table.schedule import Schedule


@frozen(kw_only=True)
class Timeline:
    """Result of `simulate` or `measured`. Fractions are in the units of the costs."""

    schedule: Schedule
    ticks: Ticks
    spans: tuple[tuple[Span, ...], ...]
    """Computations of each rank, in order."""
    peak_memory: tuple[Fraction, ...]
    """Peak activation memory of each rank."""

    @property
    def makespan(self) -> Fraction:
        """Time from the first start to the last end."""
        return Fraction(self.end, self.ticks.per_unit)

    @property
    def end(self) -> int:
        """End of the last computation, in ticks."""
        return max(row[-1].end for row in self.spans if row)

    @property
    def busy(self) -> tuple[Fraction, ...]:
        """Computing time of each rank."""
        return tuple(
            Fraction(sum(span.end - span.start for span in row), self.ticks.per_unit)
            for row in self.spans
        )

    @property
    def bubble(self) -> Fraction:
        """Idle fraction of all ranks' time up to the makespan."""
        total = self.makespan * len(self.spans)
        return 1 - sum(self.busy) / total if total else Fraction(0)

    @property
    def lost(self) -> Fraction:
        """Makespan minus the work of the busiest rank: the bubble of closed formulas."""
        return self.makespan - max(self.busy)

    @property
    def lost_in_span(self) -> Fraction:
        """Maximum idle time of a rank between its first start and its last end.

        This is the loss if a rank can start the next step before others end this one, as
        zero-bubble schedules do by validating the optimizer step afterwards.
        """
        idle = [
            row[-1].end - row[0].start - sum(span.end - span.start for span in row)
            for row in self.spans
            if row
        ]
        return Fraction(max(idle), self.ticks.per_unit)

    @property
    def critical_path(self) -> tuple[tuple[int, Span], ...]:
        """Chain of (rank, span) from time 0 to the makespan that determines it, in order."""
        _, rank = max((row[-1].end, rank) for rank, row in enumerate(self.spans) if row)
        current: tuple[int, int] | None = (rank, len(self.spans[rank]) - 1)
        path = []
        while current is not None:
            span = self.spans[current[0]][current[1]]
            path.append((current[0], span))
            current = span.cause
        return tuple(reversed(path))


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate `schedule` with `costs`.

    Raises:
        ScheduleError: the costs are for another number of stages, or the schedule deadlocks.
    """
    check_type("schedule", schedule, Schedule, "a Schedule", error=ScheduleError)
    check_type("costs", costs, Costs, "Costs", error=ScheduleError)
    if costs.stages != schedule.stages:
        raise ScheduleError(
            f"costs of {costs.stages} stages for a schedule of {schedule.stages} stages; use one "
            "entry per stage"
        )
    ticks, rows = costs.ticks(), schedule.computations()
    simulation = EventSimulation(rows, schedule.placement, ticks)
    # The ranks returned are stuck; report the first.
    for rank in simulation.run():
        raise ScheduleError(
            f"rank {rank} never receives the input of {rows[rank][len(simulation.spans[rank])]}; "
            "verify this schedule to find the deadlock"
        )
    return Timeline(
        schedule=schedule,
        ticks=ticks,
        spans=tuple(map(tuple, simulation.spans)),
        peak_memory=peak_memory(schedule, ticks),
    )


def peak_memory(schedule: Schedule, ticks: Ticks) -> tuple[Fraction, ...]:
    """Peak activation memory of each rank."""
    return tuple(
        Fraction(_peak(row, ticks), ticks.memory_per_unit) for row in schedule.computations()
    )


def _peak(row: Sequence[Action], ticks: Ticks) -> int:
    used = peak = 0
    for action in row:
        for part in action.computations:
            if part.kind is Kind.FORWARD:
                used += ticks.activation[part.stage]
        # A backward frees memory when it ends, so its own activations still count here.
        peak = max(peak, used)
        for part in action.computations:
            if part.kind is Kind.BACKWARD:
                used -= ticks.activation[part.stage]
            elif part.kind is Kind.BACKWARD_INPUT:
                # I frees everything that the weight backward does not need.
                used -= ticks.activation[part.stage] - ticks.retained[part.stage]
            elif part.kind is Kind.BACKWARD_WEIGHT:
                used -= ticks.retained[part.stage]
    return peak
