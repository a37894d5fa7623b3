"""Simulates a schedule with given costs, exactly: when each action runs, what is idle and why.

Messages go as `Playback` says. The two actions of an overlapped pair run one after the other, as
our runtime performs them, so nothing is gained by the pair. Times are integers (`Ticks`), so that
nothing is rounded.
"""

from collections.abc import Sequence
from fractions import Fraction

from attrs import frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.costs import Costs, Ticks
from ms_parallel.schedules.table.playback import Playback, Span
from ms_parallel.schedules.table.schedule import Schedule


@frozen(kw_only=True)
class Timeline:
    """What `simulate` or `measured` found. Fractions are in the units of the costs."""

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
    ticks, rows = costs.ticks(), schedule.computations()
    playback = Playback(rows, schedule.placement, ticks)
    for rank in playback.run():
        raise ScheduleError(
            f"rank {rank} never gets what {rows[rank][len(playback.spans[rank])]} needs; run "
            "verify on this schedule to see where it deadlocks"
        )
    return Timeline(
        schedule=schedule,
        ticks=ticks,
        spans=tuple(map(tuple, playback.spans)),
        peak_memory=peak_memory(schedule, ticks),
    )


def peak_memory(schedule: Schedule, ticks: Ticks) -> tuple[Fraction, ...]:
    """Compute for each rank the most activation memory that it holds at once."""
    return tuple(
        Fraction(_peak(row, ticks), ticks.memory_per_unit) for row in schedule.computations()
    )


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
