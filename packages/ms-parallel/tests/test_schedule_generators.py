"""Every generator creates valid schedules with the published bubbles and memory."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules import (
    Costs,
    Schedule,
    breadth_first,
    dualpipe_v,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    simulate,
    v_half,
    v_min,
    verify,
    zb1p,
    zb2p,
    zb_h1,
    zb_h2,
    zb_v,
)

BY_SIZE = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved_one_f_one_b,
    "interleaved 3": lambda ranks, count: interleaved_one_f_one_b(ranks, count, 3),
    "breadth-first": breadth_first,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb1p": lambda ranks, count: zb1p(Costs.uniform(ranks), count),
    "zb2p": lambda ranks, count: zb2p(Costs.uniform(ranks), count),
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": lambda ranks, count: dualpipe_v(ranks, max(count, 2 * ranks)),
}
PIPELINES = [(2, 4), (2, 7), (4, 8), (4, 13), (8, 24)]
FORWARD, INPUT, WEIGHT = Fraction(7, 5), Fraction(3, 2), Fraction(6, 5)
FULL = FORWARD + INPUT + WEIGHT


@pytest.mark.parametrize("name", BY_SIZE)
@settings(deadline=None, max_examples=15)
@given(st.integers(1, 6), st.integers(1, 14))
def test_every_generator_is_valid_for_every_size(name, ranks, microbatches):
    """Also if microbatches are fewer than ranks or not divisible by them; CSV is lossless."""
    schedule = BY_SIZE[name](ranks, microbatches)
    verify(schedule)
    assert Schedule.from_csv(schedule.to_csv(), name=schedule.name) == schedule


def play(schedule, forward=1, backward_input=1, backward_weight=1):
    """Timeline of a schedule with equal stages of these times."""
    costs = Costs.uniform(
        schedule.stages,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
    )
    return simulate(schedule, costs)


@pytest.mark.parametrize(("p", "m"), PIPELINES)
def test_lost_time_follows_the_closed_formulas_exactly(p, m):
    """Lost time equals the papers' formulas, as exact fractions."""
    assert play(gpipe(p, m), FORWARD, INPUT, WEIGHT).lost == (p - 1) * FULL
    assert play(one_f_one_b(p, m), FORWARD, INPUT, WEIGHT).lost == (p - 1) * FULL
    assert play(breadth_first(p, m), FORWARD, INPUT, WEIGHT).lost == (p - 1) * FULL
    assert play(interleaved_one_f_one_b(p, m), FORWARD, INPUT, WEIGHT).lost == (p - 1) * FULL
    costs = Costs.uniform(p, forward=FORWARD, backward_input=INPUT, backward_weight=WEIGHT)
    assert simulate(zb1p(costs, m), costs).lost == (p - 1) * (FULL - 2 * WEIGHT)
    assert play(zb_h1(p, m)).lost == p - 1
    assert play(zb2p(Costs.uniform(p), m)).lost == p - 1
    assert play(zb2p(Costs.uniform(p), m)).lost_in_span == 0
    assert play(zb_h2(p, m)).lost_in_span == 0
    assert play(zb_v(p, m)).lost == p - 1
    assert play(zb_v(p, m)).lost_in_span == 0


@pytest.mark.parametrize("p", [2, 4, 8])
def test_lost_time_of_dualpipe_v_follows_its_paper(p):
    """(PP/2 - 1)(F&B + B - 3W) with PP/2 ranks, where the overlap takes F + B."""
    assert play(dualpipe_v(p, 3 * p)).lost == (p - 1) * (3 + 2 - 3)


@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 32), (12, 48), (16, 64)])
def test_controllable_memory_is_a_half_and_a_third_of_1f1b(p, m):
    """V-Half: half the bubble in half the memory plus 2; V-Min: 2/3 plus O(p) in a third."""
    bubble = play(one_f_one_b(p, m), 2, 2, 2).lost
    half, minimal = v_half(p, m), v_min(p, m)
    assert play(half).lost <= bubble / 2
    assert max(verify(half).peak_activations) <= p + 2
    assert play(minimal).lost <= bubble * 2 / 3 + p / 4
    assert max(verify(minimal).peak_activations) <= -(-2 * p // 3) + 2


def test_bubbles_equal_the_published_table():
    """Published bubbles for p=8, m=24; small stages take half the time of full ones."""
    half, small = Fraction(1, 2), (0.5, 0.65, 0.35)
    slow = Costs.uniform(8, forward=1, backward_input=1.3, backward_weight=0.7, latency=0.1)
    slow_half = Costs.uniform(
        16, forward=small[0], backward_input=small[1], backward_weight=small[2], latency=0.1
    )

    def bubble(schedule, costs):
        return round(float(simulate(schedule, costs).bubble), 4)

    assert bubble(one_f_one_b(8, 24), Costs.uniform(8)) == 0.2258
    assert bubble(one_f_one_b(8, 24), slow) == 0.2683
    assert bubble(interleaved_one_f_one_b(8, 24), slow_half) == 0.1579
    assert bubble(zb1p(Costs.uniform(8), 24), Costs.uniform(8)) == 0.0886
    assert bubble(zb1p(slow, 24), slow) == 0.1628
    equal = Costs.uniform(16, forward=half, backward_input=half, backward_weight=half)
    assert bubble(interleaved_one_f_one_b(8, 24), equal) == 0.1273
    assert bubble(zb_v(8, 24), equal) == 0.0464


@pytest.mark.parametrize("name", BY_SIZE)
@pytest.mark.parametrize("size", [(0, 4), (2, 0), (-1, 4)])
def test_sizes_below_one_are_refused(name, size):
    """Zero ranks or microbatches give a one-line error in every generator."""
    if name == "dualpipe-v" and size[1] == 0:
        pytest.skip("BY_SIZE always passes it enough microbatches")
    with pytest.raises(ScheduleError) as caught:
        BY_SIZE[name](*size)
    assert "\n" not in str(caught.value)
