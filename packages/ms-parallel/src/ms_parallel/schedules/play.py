"""Starts of the actions of fixed rows: the quick inner loop where `simulate` would be too much."""

from collections.abc import Sequence

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.arrange import Problem

__all__ = ["play_rows"]

_Op = tuple[int, int, int]


def play_rows(problem: Problem, rows: Sequence[Sequence[_Op]]) -> dict[_Op, int]:
    """When each action of rows (kind, stage, microbatch) starts, each as early as it can.

    Raises:
        ScheduleError: the rows wait for one another for ever.
    """
    ticks, home, stages = problem.ticks, problem.placement, problem.ticks.stages
    lengths = (ticks.forward, ticks.backward_input, ticks.backward_weight)
    free, cursor = [0] * len(rows), [0] * len(rows)
    starts: dict[_Op, int] = {}
    arrived: dict[_Op, int] = {(0, 0, number): 0 for number in range(problem.microbatches)}
    link_free: dict[tuple[int, int], int] = {}
    pending = list(range(len(rows)))
    while pending:
        rank = pending.pop()
        while cursor[rank] < len(rows[rank]):
            op = rows[rank][cursor[rank]]
            kind, stage, number = op
            if op not in arrived:
                break
            cursor[rank] += 1
            start = starts[op] = max(free[rank], arrived[op])
            end = free[rank] = start + lengths[kind][stage]
            if kind == 1:
                arrived[2, stage, number] = end
            step = (1, -1, 0)[kind]
            target: _Op = (kind, stage + step, number)
            if kind == 0 and stage == stages - 1:
                arrived[1, stage, number] = end
            elif step and 0 <= stage + step < stages:
                peer = home[stage + step]
                if peer != rank:
                    sent = max(end, link_free.get((rank, peer), 0))
                    sent += ticks.transfer[min(stage, stage + step)]
                    link_free[rank, peer] = sent
                    end = sent + ticks.latency
                    pending.append(peer)
                arrived[target] = end
    if len(starts) < 3 * stages * problem.microbatches:
        raise ScheduleError("the rows wait for one another for ever; verify them first")
    return starts
