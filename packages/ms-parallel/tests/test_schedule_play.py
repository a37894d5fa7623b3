"""Rows of which one was changed are played from there, and give what a whole play gives."""

from random import Random

import pytest

from ms_parallel.schedules import Costs, looped, search, vee
from ms_parallel.schedules.construction.problem import problem_of
from ms_parallel.schedules.solver.row_simulator import RowSimulator


def costs(random: Random, stages: int, transfer: int) -> Costs:
    """Unequal ones, some of them nothing."""
    draw = [[random.choice((0, 1, 2, 3, 5)) for _ in range(stages)] for _ in range(3)]
    return Costs(
        forward=[1 + each for each in draw[0]],
        backward_input=draw[1],
        backward_weight=draw[2],
        latency=random.choice((0, 1)),
        bandwidth=1,
        message_bytes=[transfer] * stages,
    )


@pytest.mark.parametrize("transfer", [0, 1])
@pytest.mark.parametrize("placement", [vee(3), looped(3, 2), (0, 1, 2)])
def test_a_replay_equals_a_play(placement, transfer):
    """Eight hundred swaps of neighbors, taken or not: equal starts, ends and deadlocks."""
    random = Random(len(placement) + transfer)
    stages, stuck = len(placement), 0
    for seed in range(2):
        problem = problem_of(costs(random, stages, transfer), None, 5, tuple(placement))
        simulator = RowSimulator(problem)
        found = search(
            costs(random, stages, transfer), None, microbatches=5, placement=placement,
            seed=seed, effort=0.01,
        )  # fmt: skip
        kinds = {"F": 0, "I": 1, "W": 2}
        rows = [
            [
                simulator.number((kinds[kind], action.stage, action.microbatch))
                for action in row
                for kind in ("IW" if action.kind.value == "B" else action.kind.value)
            ]
            for row in found.schedule.computations()
        ]
        played = simulator.simulate(rows)
        assert played is not None
        for _ in range(400):
            rank = random.randrange(3)
            at = random.randrange(len(rows[rank]) - 1)
            row = list(rows[rank])
            row[at], row[at + 1] = row[at + 1], row[at]
            tried = [*rows[:rank], row, *rows[rank + 1 :]]
            whole = simulator.simulate(tried)
            since = played.starts[rows[rank][at]]
            assert simulator.resimulate(tried, played, rank, at, since) == whole
            stuck += whole is None
            if whole is not None and random.random() < 0.7:
                rows, played = tried, whole
    assert stuck > 20
