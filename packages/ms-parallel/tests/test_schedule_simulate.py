"""`simulate`: exact times, links, memory and the critical path, on small tables."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules import (
    Costs,
    Schedule,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    simulate,
    zb_v,
)

numbers = st.integers(1, 9)


def test_decimals_are_exact():
    """Ten forward and backward passes of a tenth sum to 1, not 0.9999."""
    costs = Costs.uniform(1, forward=0.03, backward_input=0.03, backward_weight=0.04)
    assert simulate(gpipe(1, 10), costs).makespan == 1


def test_a_two_stage_step_by_hand():
    """F0 starts at 0; its message of 4 bytes at bandwidth 2 and latency 1 arrives at 2 + 2 + 1."""
    costs = Costs(
        forward=[2, 3],
        backward_input=[1, 1],
        backward_weight=[1, 2],
        latency=1,
        bandwidth=2,
        message_bytes=[4, 0],
    )
    line = simulate(gpipe(2, 2), costs)
    spans = [[(str(s.action), s.start, s.end) for s in row] for row in line.spans]
    assert spans == [
        [("0F0", 0, 2), ("0F1", 2, 4), ("0B0", 17, 19), ("0B1", 20, 22)],
        [("1F0", 5, 8), ("1F1", 8, 11), ("1B0", 11, 14), ("1B1", 14, 17)],
    ]
    assert line.makespan == 22
    assert line.busy == (8, 12)
    assert line.lost == 10
    assert line.bubble == 1 - Fraction(20, 44)


def test_a_link_carries_one_message_at_a_time():
    """Transfers of 3 after forwards of 1 queue up: the third arrives after 1 + 3 * 3."""
    costs = Costs(
        forward=[1, 1],
        backward_input=[0, 0],
        backward_weight=[0, 0],
        bandwidth=1,
        message_bytes=[3, 0],
    )
    line = simulate(gpipe(2, 3), costs)
    assert [span.start for span in line.spans[1][:3]] == [4, 7, 10]


def test_memory_is_held_until_its_last_use():
    """I frees all but what W needs, and W frees the rest."""
    text = "0F0,0F1,0I0,0F2,0W0,0I1,0W1,0I2,0W2\n"
    costs = Costs(
        forward=[1], backward_input=[1], backward_weight=[1], activation=[10], retained=[4]
    )
    assert simulate(Schedule.from_csv(text), costs).peak_memory == (24,)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 8), st.data())
def test_the_critical_path_explains_the_makespan(ranks, microbatches, data):
    """It starts at 0 and ends at the makespan, and its gaps are messages between ranks."""
    schedule = data.draw(st.sampled_from([one_f_one_b, zb_v, interleaved_one_f_one_b]))(
        ranks, microbatches
    )
    cost_list = st.lists(numbers, min_size=schedule.stages, max_size=schedule.stages)
    costs = Costs(
        forward=data.draw(cost_list),
        backward_input=data.draw(cost_list),
        backward_weight=data.draw(cost_list),
        latency=data.draw(st.integers(0, 3)),
    )
    line = simulate(schedule, costs)
    path = line.critical_path
    assert path[0][1].start == 0
    assert path[-1][1].end == line.makespan
    for (rank, before), (next_rank, after) in pairwise(path):
        gap = costs.latency if rank != next_rank else 0
        assert after.start == before.end + gap


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"forward": [1, -1]}, "must be at least 0, got -1"),
        ({"forward": [1, float("nan")]}, "must be a finite number"),
        ({"forward": []}, "at least one stage"),
        ({"backward_input": [1]}, "backward_input has 1 entries"),
        ({"bandwidth": 0}, "bandwidth must be above 0"),
        ({"retained": [2, 1]}, "stage 0 retains 2"),
    ],
)
def test_invalid_costs_are_refused(fields, complaint):
    """Costs are finite, at least 0, and one per stage."""
    plain = {"forward": [1, 1], "backward_input": [1, 1], "backward_weight": [1, 1]}
    with pytest.raises(ScheduleError, match=complaint):
        Costs(**(plain | fields))


def test_costs_for_a_different_number_of_stages_are_refused():
    """The message has both numbers of stages."""
    with pytest.raises(ScheduleError, match="costs of 3 stages for a schedule of 2"):
        simulate(gpipe(2, 2), Costs.uniform(3))
