"""Pipelines of ranks of unlike speed: each gets layers by its own costs, and steps are shorter."""

import itertools
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_processes

from ms_parallel.errors import ScheduleError
from ms_parallel.planner.probes import rank_slowness, segment_costs
from ms_parallel.planner.shortest import shortest_schedule
from ms_parallel.schedules import Schedule, SegmentCosts, simulate, verify
from ms_parallel.schedules.solver.balance import split_by_work

RUNS = Path(__file__).with_name("stage_runs.py")


def model(times: list[int], slowness: list[float]) -> SegmentCosts:
    """Segments of these times on the fastest rank."""
    return SegmentCosts(
        forward=times, backward_input=times, backward_weight=times, slowness=slowness
    )


@settings(max_examples=60, deadline=None)
@given(
    times=st.lists(st.integers(1, 9), min_size=4, max_size=7),
    slowness=st.lists(st.sampled_from([1, 1.5, 2, 4]), min_size=2, max_size=3),
)
def test_no_other_split_has_a_shorter_largest_stage(
    times: list[int], slowness: list[float]
) -> None:
    """By trying all cuts, each stage at the pace of its rank."""
    ranks = range(len(slowness))
    costs = model(times, slowness)

    def largest(split: tuple[int, ...]) -> Fraction:
        made = costs.stages(split, ranks)
        passes = (made.forward, made.backward_input, made.backward_weight)
        return max(map(sum, zip(*passes, strict=True)))

    every = itertools.product(range(1, len(times) + 1), repeat=len(slowness))
    best = min(largest(split) for split in every if sum(split) == len(times))
    assert largest(split_by_work(costs, ranks)) == best


def test_a_slow_rank_has_fewer_layers_and_the_step_is_shorter() -> None:
    """Eight layers alike, the second rank at a third of the speed: 6 and 2, not 4 and 4."""
    costs = model([10] * 8, [1, 3])
    found = shortest_schedule(costs, 2, 8, None, conditions={}, effort=0.05)
    schedule = Schedule.from_csv(found.table)
    verify(schedule)
    layers = [0, 0]
    for stage, rank in enumerate(schedule.placement):
        layers[rank] += found.layers[stage]
    assert layers == [6, 2]
    # Eight microbatches of 4 layers at 90 each pass the slow rank if they are shared out equally.
    assert found.one_f_one_b_ms >= 8 * 4 * 90 / 1000
    assert found.makespan_ms <= 0.65 * found.one_f_one_b_ms
    again = simulate(schedule, costs.stages(found.layers, schedule.placement))
    assert float(again.makespan) / 1000 == pytest.approx(found.makespan_ms)


def test_each_rank_keeps_to_its_own_memory() -> None:
    """The fast rank has little: layers move to the slow one, which has more, and the cap holds."""
    costs = model([10] * 8, [1, 3])
    wide = shortest_schedule(costs, 2, 8, None, conditions={}, effort=0.05)
    tight = shortest_schedule(costs, 2, 8, (8, 16), conditions={}, effort=0.05)
    assert tight.memory_cap_bytes == (8, 16)
    assert tight.peak_bytes[0] <= 8
    assert tight.peak_bytes[1] <= 16
    assert wide.peak_bytes[0] > 8
    assert tight.makespan_ms > wide.makespan_ms
    with pytest.raises(ScheduleError, match="memory"):
        shortest_schedule(costs, 2, 8, (1, 1), conditions={}, effort=0.05)


def test_ranks_are_compared_by_the_same_segments() -> None:
    """A heavy last segment makes no rank slow; a rank that takes twice as long for the same is."""
    here = [1.0, 1.0, 1.0, 5.0]  # two segments a rank
    assert rank_slowness(here, [1.1, 1.1, 1.0, 5.0], 2) == [1.0, 1.0]
    assert rank_slowness([1.0, 1.0, 2.0, 10.0], [2.0, 2.0, 1.0, 5.0], 2) == [1.0, 2.0]
    three = rank_slowness([3.0, 2.0, 1.0], [2.0, 1.0, 3.0], 3)
    assert three == pytest.approx([3.0, 2.0, 1.0])


def test_times_come_out_as_those_of_the_fastest_rank() -> None:
    """What was timed on the slow rank is divided by its slowness."""
    table = torch.tensor([[1e-3, 1e-3, 3e-3, 3e-3]] * 3 + [[8.0] * 4] * 2)
    costs = segment_costs([1] * 4, table, 0.0, 0.0, [1.0, 3.0])
    assert list(costs.forward) == [1000] * 4
    assert costs.stages([2, 2], [0, 1]).forward == (2000, 6000)
    assert costs.stages([2, 2], [1, 0]).forward == (6000, 2000)


def test_a_rank_that_nobody_knows_is_refused() -> None:
    """With what is there."""
    with pytest.raises(ScheduleError, match="slowness has 2 entries but a stage is on rank 2"):
        model([1] * 3, [1, 2]).stages([1, 1, 1], [0, 1, 2])
    with pytest.raises(ScheduleError, match="must be above 0"):
        model([1] * 3, [1, 0])


def slowed() -> tuple[dict[str, Any], dict[str, Any]]:
    """Search and train two stages whose second rank sleeps four times as long in each block."""
    first, second = run_processes(2, RUNS, "compared", slow={"0": 0.005, "1": 0.02}, steps=4)
    return first, second


def test_a_slow_rank_gets_fewer_layers_and_losses_stay_equal() -> None:
    """The search measures each rank's slowness with the real runtime, and ranks agree on it."""
    first, second = slowed()
    assert first["layers"] == second["layers"]
    assert first["slowness"] == second["slowness"]
    assert first["slowness"][0] == 1.0
    assert first["slowness"][1] > 1.5
    layers = [0, 0]
    for stage, rank in enumerate(first["ranks"]):
        layers[rank] += first["layers"][stage]
    assert layers[0] > layers[1]
    assert first["found"]["losses"] == pytest.approx(first["equal"]["losses"], rel=1e-5)


@pytest.mark.slow
def test_fewer_layers_on_a_slow_rank_make_a_step_shorter() -> None:
    """Compares elapsed time, so it is not among the default tests."""
    first, _ = slowed()
    assert first["found"]["seconds"] < 0.85 * first["equal"]["seconds"]
