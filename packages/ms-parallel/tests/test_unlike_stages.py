"""Pipelines on ranks of different speed: layers follow measured costs, and steps get shorter."""

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
    """Segments with these times on the fastest rank."""
    return SegmentCosts(
        forward=times, backward_input=times, backward_weight=times, slowness=slowness
    )


@settings(max_examples=60, deadline=None)
@given(
    times=st.lists(st.integers(1, 9), min_size=4, max_size=7),
    slowness=st.lists(st.sampled_from([1, 1.5, 2, 4]), min_size=2, max_size=3),
)
def test_the_split_minimizes_the_largest_stage(times: list[int], slowness: list[float]) -> None:
    """Compared with all splits, with each stage at the speed of its rank."""
    ranks = range(len(slowness))
    costs = model(times, slowness)

    def largest(split: tuple[int, ...]) -> Fraction:
        stages = costs.stages(split, ranks)
        passes = (stages.forward, stages.backward_input, stages.backward_weight)
        return max(map(sum, zip(*passes, strict=True)))

    splits = itertools.product(range(1, len(times) + 1), repeat=len(slowness))
    best = min(largest(split) for split in splits if sum(split) == len(times))
    assert largest(split_by_work(costs, ranks)) == best


def test_a_slow_rank_has_fewer_layers_and_the_step_is_shorter() -> None:
    """Eight equal layers, with the second rank three times slower: 6 and 2 instead of 4 and 4."""
    costs = model([10] * 8, [1, 3])
    shortest = shortest_schedule(costs, 2, 8, None, conditions={}, effort=0.05)
    schedule = Schedule.from_csv(shortest.table)
    verify(schedule)
    layers = [0, 0]
    for stage, rank in enumerate(schedule.placement):
        layers[rank] += shortest.layers[stage]
    assert layers == [6, 2]
    # With an equal split, eight microbatches of 4 layers of 90 each pass the slow rank.
    assert shortest.one_f_one_b_ms >= 8 * 4 * 90 / 1000
    assert shortest.makespan_ms <= 0.65 * shortest.one_f_one_b_ms
    simulated = simulate(schedule, costs.stages(shortest.layers, schedule.placement))
    assert float(simulated.makespan) / 1000 == pytest.approx(shortest.makespan_ms)


def test_each_rank_respects_its_memory_cap() -> None:
    """The fast rank has little memory, so layers move to the slow rank, and caps are respected."""
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
    """A heavy last segment does not make a rank slow; twice the time for the same segment does."""
    first_pass = [1.0, 1.0, 1.0, 5.0]  # two segments per rank
    assert rank_slowness(first_pass, [1.1, 1.1, 1.0, 5.0], 2) == [1.0, 1.0]
    assert rank_slowness([1.0, 1.0, 2.0, 10.0], [2.0, 2.0, 1.0, 5.0], 2) == [1.0, 2.0]
    three = rank_slowness([3.0, 2.0, 1.0], [2.0, 1.0, 3.0], 3)
    assert three == pytest.approx([3.0, 2.0, 1.0])


def test_times_are_normalized_to_the_fastest_rank() -> None:
    """Times on the slow rank are divided by its slowness."""
    table = torch.tensor([[1e-3, 1e-3, 3e-3, 3e-3]] * 3 + [[8.0] * 4] * 2)
    costs = segment_costs([1] * 4, table, 0.0, 0.0, [1.0, 3.0])
    assert list(costs.forward) == [1000] * 4
    assert costs.stages([2, 2], [0, 1]).forward == (2000, 6000)
    assert costs.stages([2, 2], [1, 0]).forward == (6000, 2000)


def test_a_rank_without_slowness_is_refused() -> None:
    """The message has the number of entries."""
    with pytest.raises(ScheduleError, match="slowness has 2 entries but a stage is on rank 2"):
        model([1] * 3, [1, 2]).stages([1, 1, 1], [0, 1, 2])
    with pytest.raises(ScheduleError, match="must be above 0"):
        model([1] * 3, [1, 0])


def slow_run() -> tuple[dict[str, Any], dict[str, Any]]:
    """Search and train two stages whose second rank sleeps four times as long in each block."""
    first, second = run_processes(2, RUNS, "compare_stages", slow={"0": 0.005, "1": 0.02}, steps=4)
    return first, second


def test_a_slow_rank_gets_fewer_layers_and_losses_stay_equal() -> None:
    """Slowness is measured with the real runtime, and ranks agree on it."""
    first, second = slow_run()
    assert first["layers"] == second["layers"]
    assert first["slowness"] == second["slowness"]
    assert first["slowness"][0] == 1.0
    assert first["slowness"][1] > 1.5
    layers = [0, 0]
    for stage, rank in enumerate(first["ranks"]):
        layers[rank] += first["layers"][stage]
    assert layers[0] > layers[1]
    assert first["searched"]["losses"] == pytest.approx(first["equal"]["losses"], rel=1e-5)


@pytest.mark.slow
def test_fewer_layers_on_a_slow_rank_make_a_step_shorter() -> None:
    """Compares elapsed time, so it is not a default test."""
    first, _ = slow_run()
    assert first["searched"]["seconds"] < 0.85 * first["equal"]["seconds"]
