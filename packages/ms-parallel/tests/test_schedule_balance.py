"""`balance` against every split of a small model, and in typical cases."""

from itertools import combinations, pairwise

import pytest

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules import SegmentCosts, balance, search, vee, verify

QUICK = 0.02


def layers(times):
    """Layers whose backward passes take as long as their forward passes."""
    return SegmentCosts(forward=times, backward_input=times, backward_weight=times)


def every_split(count, stages):
    """All ways to split layers into stages, in order, with at least one each."""
    for cuts in combinations(range(1, count), stages - 1):
        edges = (0, *cuts, count)
        yield tuple(after - before for before, after in pairwise(edges))


@pytest.mark.parametrize("times", [[1, 2, 2, 2, 2, 6], [3, 1, 1, 1, 1, 1, 4]])
def test_no_other_split_is_better(times):
    """No split of a small model gives a shorter schedule with the same effort."""
    model = layers(times)
    balanced = balance(model, placement=(0, 1, 2), microbatches=6, effort=QUICK)
    assert sum(balanced.split) == len(times)
    best = min(
        search(model.stages(split), microbatches=6, placement=(0, 1, 2), effort=QUICK).makespan
        for split in every_split(len(times), 3)
    )
    assert balanced.found.makespan <= best


def test_a_stage_with_a_heavy_head_gets_fewer_layers():
    """With ten equal layers and a head of three, the last stage gets fewer layers."""
    balanced = balance(layers([1] * 10 + [3]), placement=(0, 1, 2, 3), microbatches=8, effort=QUICK)
    assert balanced.split[-1] < balanced.split[0]
    verify(balanced.found.schedule)


def test_on_a_v_the_ranks_are_balanced_not_the_stages():
    """Rank 0 has the first and last stage; a head of 4 makes its other stage small."""
    balanced = balance(layers([1] * 8 + [4]), placement=vee(2), microbatches=6, effort=QUICK)
    first, second, third, last = balanced.split
    work = (first + last + 3, second + third)
    assert max(work) == 6


def test_memory_decides_if_work_is_equal():
    """Layers of equal time but unequal memory are split to fit the cap."""
    model = SegmentCosts(
        forward=[1] * 4, backward_input=[1] * 4, backward_weight=[1] * 4, activation=[5, 5, 1, 1]
    )
    balanced = balance(model, 7, placement=(0, 1), microbatches=2, effort=QUICK)
    assert balanced.split == (1, 3)
    assert max(balanced.found.peak_memory) <= 7


@pytest.mark.parametrize(
    ("times", "complaint"),
    [([1], "1 segments for 2 stages"), ([1, -2], "must be at least 0, got -2")],
)
def test_invalid_models_are_refused(times, complaint):
    """Too few layers, or invalid costs."""
    with pytest.raises(ScheduleError, match=complaint):
        balance(layers(times), placement=(0, 1), microbatches=2, effort=QUICK)
