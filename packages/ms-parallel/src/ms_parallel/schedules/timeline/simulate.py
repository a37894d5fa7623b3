"""Plays a schedule with given costs, exactly: when each action runs, what is idle and why.

The transport is asynchronous: a message leaves when its computation ends and the link between the
two ranks is free, occupies the link for size / bandwidth, and arrives a latency later. The two
actions of an overlapped pair run one after the other, as our runtime performs them, so nothing is
gained by the pair. Times are integers (`Ticks`), so that nothing is rounded.
"""

from collections.abc import Sequence

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import Action
from ms_parallel.schedules.table.communication import Result, duration, results, sources
from ms_parallel.schedules.table.costs import Costs, Ticks
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.schedules.timeline.timeline import Span, Timeline, peak_memory

__all__ = ["simulate"]


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
    return Timeline(
        schedule=schedule,
        ticks=ticks,
        spans=_play(schedule.computations(), schedule.placement, ticks),
        peak_memory=peak_memory(schedule, ticks),
    )


class _Player:
    """The state of one simulation; `advance` runs a rank as far as its inputs allow."""

    def __init__(
        self, rows: Sequence[Sequence[Action]], placement: Sequence[int], ticks: Ticks
    ) -> None:
        self.rows, self.placement, self.ticks = rows, placement, ticks
        self.spans: list[list[Span]] = [[] for _ in rows]
        self.arrival: dict[Result, tuple[int, int, int]] = {}
        self.link_free: dict[tuple[int, int], int] = {}
        self.waiting: dict[Result, int] = {}

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
            end = start + duration(action, self.ticks)
            spans.append(Span(action, start, end, cause))
            for result in results(action):
                self._deliver(result, (end, rank, len(spans) - 1), woken)
        return woken

    def _deliver(self, result: Result, made: tuple[int, int, int], woken: list[int]) -> None:
        """Note when a result that was `made` at (end, rank, index) reaches its consumer's rank."""
        backward, stage, _ = result
        end, rank, index = made
        consumer = stage + (-1 if backward else 1)
        if not 0 <= consumer < len(self.placement):
            return
        target = self.placement[consumer]
        if target != rank:
            transfer = self.ticks.transfer[min(stage, consumer)]
            sent = max(end, self.link_free.get((rank, target), 0)) + transfer
            self.link_free[rank, target] = sent
            end = sent + self.ticks.latency
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
