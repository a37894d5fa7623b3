"""Fast simulation of fixed rows, the inner loop of the search; `timeline.simulate` is too slow."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.construction.problem import Operation, Problem


class RowTimes(NamedTuple):
    """Times of the actions of rows, in ticks."""

    starts: list[int]
    """Start of each action."""
    arrived: list[int]
    """Arrival of each action's input."""
    end: int


class RowSimulator:
    """Simulates rows of one problem; actions are numbered so that their data can be in lists.

    Args:
        problem: scheduling problem.
    """

    def __init__(self, problem: Problem) -> None:
        ticks, placement, count = problem.ticks, problem.placement, problem.microbatches
        stages = ticks.stages
        self.ranks, self.count, self.stages = problem.ranks, count, stages
        self.ops: list[Operation] = [
            (phase, stage, number)
            for phase in range(3)
            for stage in range(stages)
            for number in range(count)
        ]
        self.length = [problem.lengths[phase][stage] for phase, stage, _ in self.ops]
        self.rank = [placement[stage] for _, stage, _ in self.ops]
        self.target = [self._target(op) for op in self.ops]
        """Action that consumes the result of each action; -1 for none."""
        self.source = [-1] * len(self.ops)
        """Action whose result each action consumes; -1 for none."""
        for op, target in enumerate(self.target):
            if target >= 0:
                self.source[target] = op
        for op in range(stages * count):
            # A weight backward consumes the result of its input backward.
            self.source[op + 2 * stages * count] = op + stages * count
        self.crosses_ranks = [
            t >= 0 and self.rank[t] != r for t, r in zip(self.target, self.rank, strict=True)
        ]
        self.transfer = [
            # The link after stage s carries F of stage s and I of stage s + 1.
            ticks.transfer[stage - phase] if crosses else 0
            for (phase, stage, _), crosses in zip(self.ops, self.crosses_ranks, strict=True)
        ]
        self.latency, self.uses_links = ticks.latency, any(self.transfer)
        # Arrival of each input before the start: 0 for forwards of stage 0, else -1 for unknown.
        self.ready = [0 if op < count else -1 for op in range(len(self.ops))]
        inputs = range(stages * count, 2 * stages * count)
        self._action_data = [
            (
                self.length[op],
                op + stages * count if op in inputs else -1,
                target,
                self.rank[target] if self.crosses_ranks[op] else -1,
            )
            for op, target in enumerate(self.target)
        ]
        """(length, weight backward that it enables, consumer, rank of the consumer if another) per
        action; -1 for none. One tuple, for fast access."""

    def number(self, op: Operation) -> int:
        """Number of an action."""
        phase, stage, microbatch = op
        return (phase * self.stages + stage) * self.count + microbatch

    def _target(self, op: Operation) -> int:
        phase, stage, number = op
        if phase == 0:
            return self.number((0, stage + 1, number) if stage + 1 < self.stages else (1, *op[1:]))
        return self.number((1, stage - 1, number)) if phase == 1 and stage else -1

    def simulate(self, rows: Sequence[Sequence[int]]) -> RowTimes | None:
        """Simulate rows from the start; None if they deadlock."""
        starts, cursor = [-1] * len(self.ops), [0] * self.ranks
        return self._simulate(rows, starts, self.ready[:], cursor, [0] * self.ranks)

    def resimulate(
        self,
        rows: Sequence[Sequence[int]],
        before: RowTimes,
        rank: int,
        first: int,
        change_time: int,
    ) -> RowTimes | None:
        """Simulate rows again after a change to one row, from the change on.

        Actions that start before the first changed one keep their start, as they do not depend on
        later ones.

        Args:
            rows: rows of all ranks.
            before: result for the rows before the change.
            rank: rank of the changed row.
            first: index of the first changed action.
            change_time: start of the action that was there before.
        """
        if self.uses_links:
            # The state of a link depends on all earlier messages, so simulate everything again.
            return self.simulate(rows)
        starts, arrived, action_data = before.starts[:], before.arrived[:], self._action_data
        cursor, free = [0] * self.ranks, [0] * self.ranks
        for other_rank, row in enumerate(rows):
            index = (
                first
                if other_rank == rank
                else bisect_left(row, change_time, key=starts.__getitem__)
            )
            # Actions that started before the change keep their times.
            cursor[other_rank] = index
            if index:
                free[other_rank] = starts[row[index - 1]] + self.length[row[index - 1]]
            for op in row[index:]:
                # The results of actions to simulate again are unknown.
                _, weights, target, _ = action_data[op]
                if weights >= 0:
                    arrived[weights] = -1
                if target >= 0:
                    arrived[target] = -1
        return self._simulate(rows, starts, arrived, cursor, free)

    def _simulate(
        self,
        rows: Sequence[Sequence[int]],
        starts: list[int],
        arrived: list[int],
        cursor: list[int],
        free: list[int],
    ) -> RowTimes | None:
        """Simulate each row from its cursor, at the time from which its rank is free."""
        action_data, waiting_for = self._action_data, [-1] * self.ranks
        links: dict[tuple[int, int], int] = {}
        latency, uses_links, pending = self.latency, self.uses_links, list(range(self.ranks))
        while pending:
            rank = pending.pop()
            row, time, index = rows[rank], free[rank], cursor[rank]
            waiting_for[rank], count = -1, len(row)
            while index < count:
                op = row[index]
                arrival = arrived[op]
                if arrival < 0:
                    # The producer puts this rank back into `pending`.
                    waiting_for[rank] = op
                    break
                index += 1
                if arrival > time:
                    time = arrival
                starts[op] = time
                length, weights, target, peer = action_data[op]
                time += length
                if weights >= 0:
                    arrived[weights] = time
                if target < 0:
                    continue
                # The consumer is on this rank.
                if peer < 0:
                    arrived[target] = time
                    continue
                sent = time
                if uses_links:
                    sent = max(time, links.get((rank, peer), 0)) + self.transfer[op]
                    links[rank, peer] = sent
                arrived[target] = sent + latency
                if waiting_for[peer] == target:
                    pending.append(peer)
            free[rank], cursor[rank] = time, index
        if any(index < len(row) for index, row in zip(cursor, rows, strict=True)):
            return None
        return RowTimes(starts, arrived, max(free))


def simulate_rows(problem: Problem, rows: Sequence[Sequence[Operation]]) -> dict[Operation, int]:
    """Earliest start of each action (kind, stage, microbatch) of rows.

    Raises:
        ScheduleError: the rows deadlock.
    """
    simulator = RowSimulator(problem)
    times = simulator.simulate([[simulator.number(op) for op in row] for row in rows])
    if times is None or min(times.starts) < 0:
        raise ScheduleError("the rows deadlock; verify them first")
    return dict(zip(simulator.ops, times.starts, strict=True))
