"""Plays fixed rows: the quick inner loop of the search, for which `simulate` would be too slow."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.construction.problem import Operation, Problem


class Played(NamedTuple):
    """When the actions of rows start; all in ticks."""

    starts: list[int]
    """When each action starts."""
    arrived: list[int]
    """When each action's input is there."""
    end: int


class Player:
    """Plays rows of one problem. An action is a number, so that all facts about it are in lists.

    Args:
        problem: Costs, placement and size.
    """

    def __init__(self, problem: Problem) -> None:
        ticks, home, count = problem.ticks, problem.placement, problem.microbatches
        stages = ticks.stages
        self.ranks, self.count, self.stages = problem.ranks, count, stages
        self.ops: list[Operation] = [
            (kind, stage, number)
            for kind in range(3)
            for stage in range(stages)
            for number in range(count)
        ]
        self.length = [problem.lengths[kind][stage] for kind, stage, _ in self.ops]
        self.rank = [home[stage] for _, stage, _ in self.ops]
        self.target = [self._target(op) for op in self.ops]
        """The action that uses each action's result; -1 for none."""
        self.source = [-1] * len(self.ops)
        """The action whose result each action uses; -1 for none."""
        for op, target in enumerate(self.target):
            if target >= 0:
                self.source[target] = op
        for op in range(stages * count):
            self.source[op + 2 * stages * count] = op + stages * count
        self.far = [
            t >= 0 and self.rank[t] != r for t, r in zip(self.target, self.rank, strict=True)
        ]
        self.transfer = [
            ticks.transfer[stage - kind] if far else 0
            for (kind, stage, _), far in zip(self.ops, self.far, strict=True)
        ]
        self.latency, self.linked = ticks.latency, any(self.transfer)
        self.ready = [0 if op < count else -1 for op in range(len(self.ops))]
        inputs = range(stages * count, 2 * stages * count)
        self._facts = [
            (
                self.length[op],
                op + stages * count if op in inputs else -1,
                target,
                self.rank[target] if self.far[op] else -1,
            )
            for op, target in enumerate(self.target)
        ]
        """For each action its length, the backward of weights that it allows, the action that uses
        its result, and that one's rank if it is another; -1 for none. One tuple, read at once."""

    def number(self, op: Operation) -> int:
        """Return an action's number."""
        kind, stage, microbatch = op
        return (kind * self.stages + stage) * self.count + microbatch

    def _target(self, op: Operation) -> int:
        kind, stage, number = op
        if kind == 0:
            return self.number((0, stage + 1, number) if stage + 1 < self.stages else (1, *op[1:]))
        return self.number((1, stage - 1, number)) if kind == 1 and stage else -1

    def play(self, rows: Sequence[Sequence[int]]) -> Played | None:
        """Play rows from the beginning; None if they deadlock."""
        starts, cursor = [-1] * len(self.ops), [0] * self.ranks
        return self._play(rows, starts, self.ready[:], cursor, [0] * self.ranks)

    def replay(
        self, rows: Sequence[Sequence[int]], known: Played, rank: int, first: int, since: int
    ) -> Played | None:
        """Play rows of which one was changed, from the change on.

        Actions that start before the first changed one start when they did: they wait for nothing
        that comes later.

        Args:
            rows: of all ranks.
            known: of the rows as they were.
            rank: whose row was changed.
            first: its first action that was changed.
            since: when the action that stood there started.
        """
        if self.linked:
            return self.play(rows)
        starts, arrived, facts = known.starts[:], known.arrived[:], self._facts
        cursor, free = [0] * self.ranks, [0] * self.ranks
        for each, row in enumerate(rows):
            at = first if each == rank else bisect_left(row, since, key=starts.__getitem__)
            cursor[each] = at
            if at:
                free[each] = starts[row[at - 1]] + self.length[row[at - 1]]
            for op in row[at:]:
                _, weights, to, _ = facts[op]
                if weights >= 0:
                    arrived[weights] = -1
                if to >= 0:
                    arrived[to] = -1
        return self._play(rows, starts, arrived, cursor, free)

    def _play(
        self,
        rows: Sequence[Sequence[int]],
        starts: list[int],
        arrived: list[int],
        cursor: list[int],
        free: list[int],
    ) -> Played | None:
        """Play each row from its cursor on, at the instant from which its rank is free."""
        facts, stuck = self._facts, [-1] * self.ranks
        links: dict[tuple[int, int], int] = {}
        latency, linked, pending = self.latency, self.linked, list(range(self.ranks))
        while pending:
            rank = pending.pop()
            row, now, at = rows[rank], free[rank], cursor[rank]
            stuck[rank], count = -1, len(row)
            while at < count:
                op = row[at]
                begin = arrived[op]
                if begin < 0:
                    stuck[rank] = op
                    break
                at += 1
                if begin > now:
                    now = begin
                starts[op] = now
                length, weights, to, peer = facts[op]
                now += length
                if weights >= 0:
                    arrived[weights] = now
                if to < 0:
                    continue
                if peer < 0:
                    arrived[to] = now
                    continue
                sent = now
                if linked:
                    sent = max(now, links.get((rank, peer), 0)) + self.transfer[op]
                    links[rank, peer] = sent
                arrived[to] = sent + latency
                if stuck[peer] == to:
                    pending.append(peer)
            free[rank], cursor[rank] = now, at
        if any(at < len(row) for at, row in zip(cursor, rows, strict=True)):
            return None
        return Played(starts, arrived, max(free))


def play_rows(problem: Problem, rows: Sequence[Sequence[Operation]]) -> dict[Operation, int]:
    """Compute when each action of rows (kind, stage, microbatch) starts, each as early as it can.

    Raises:
        ScheduleError: the rows wait for one another for ever.
    """
    player = Player(problem)
    played = player.play([[player.number(op) for op in row] for row in rows])
    if played is None or min(played.starts) < 0:
        raise ScheduleError("the rows wait for one another for ever; verify them first")
    return dict(zip(player.ops, played.starts, strict=True))
