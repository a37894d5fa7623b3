"""Resimulating a changed row from its change gives the result of a full simulation."""

from random import Random

import pytest

from ms_parallel.schedules import Costs, looped, search, vee
from ms_parallel.schedules.construction.problem import problem_of
from ms_parallel.schedules.solver.row_simulator import RowSimulator


def costs(random: Random, stages: int, transfer: int) -> Costs:
    """Unequal random costs, including zeros."""
    random_costs = [[random.choice((0, 1, 2, 3, 5)) for _ in range(stages)] for _ in range(3)]
    return Costs(
        forward=[1 + cost for cost in random_costs[0]],
        backward_input=random_costs[1],
        backward_weight=random_costs[2],
        latency=random.choice((0, 1)),
        bandwidth=1,
        message_bytes=[transfer] * stages,
    )


@pytest.mark.parametrize("transfer", [0, 1])
@pytest.mark.parametrize("placement", [vee(3), looped(3, 2), (0, 1, 2)])
def test_resimulation_equals_a_full_simulation(placement, transfer):
    """Eight hundred swaps of neighbors, accepted or not: equal starts, ends and deadlocks."""
    random = Random(len(placement) + transfer)
    stages, deadlocks = len(placement), 0
    for seed in range(2):
        problem = problem_of(costs(random, stages, transfer), None, 5, tuple(placement))
        simulator = RowSimulator(problem)
        searched = search(
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
            for row in searched.schedule.computations()
        ]
        simulated = simulator.simulate(rows)
        assert simulated is not None
        for _ in range(400):
            rank = random.randrange(3)
            at = random.randrange(len(rows[rank]) - 1)
            row = list(rows[rank])
            row[at], row[at + 1] = row[at + 1], row[at]
            swapped = [*rows[:rank], row, *rows[rank + 1 :]]
            expected = simulator.simulate(swapped)
            since = simulated.starts[rows[rank][at]]
            assert simulator.resimulate(swapped, simulated, rank, at, since) == expected
            deadlocks += expected is None
            if expected is not None and random.random() < 0.7:
                rows, simulated = swapped, expected
    assert deadlocks > 20
