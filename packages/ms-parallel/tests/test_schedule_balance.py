"""`balance`: against every split of a small model, and on what it exists for."""

from itertools import combinations, pairwise

import pytest

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules import SegmentCosts, balance, search, vee, verify

QUICK = 0.02


def layers(times):
    """Layers whose backwards take as long as their forwards."""
    return SegmentCosts(forward=times, backward_input=times, backward_weight=times)


def every_split(count, stages):
    """All ways to deal layers to stages, in order, at least one each."""
    for cuts in combinations(range(1, count), stages - 1):
        edges = (0, *cuts, count)
        yield tuple(after - before for before, after in pairwise(edges))


@pytest.mark.parametrize("times", [[1, 2, 2, 2, 2, 6], [3, 1, 1, 1, 1, 1, 4]])
def test_no_other_split_is_better(times):
    """No split of a small model leads to a shorter schedule at the same effort."""
    model = layers(times)
    found = balance(model, placement=(0, 1, 2), microbatches=6, effort=QUICK)
    assert sum(found.split) == len(times)
    best = min(
        search(model.stages(split), microbatches=6, placement=(0, 1, 2), effort=QUICK).makespan
        for split in every_split(len(times), 3)
    )
    assert found.found.makespan <= best


def test_a_heavy_head_gets_fewer_layers_beside_it():
    """Ten equal layers and a head of three: the last stage takes fewer of the layers."""
    found = balance(layers([1] * 10 + [3]), placement=(0, 1, 2, 3), microbatches=8, effort=QUICK)
    assert found.split[-1] < found.split[0]
    verify(found.found.schedule)


def test_on_a_v_the_ranks_are_balanced_not_the_stages():
    """Rank 0 holds the first and the last stage; a head of 4 makes its other stage small."""
    found = balance(layers([1] * 8 + [4]), placement=vee(2), microbatches=6, effort=QUICK)
    first, second, third, last = found.split
    work = (first + last + 3, second + third)
    assert max(work) == 6


def test_memory_decides_where_work_does_not():
    """Layers of equal time but unequal memory are split so that the cap is kept."""
    model = SegmentCosts(
        forward=[1] * 4, backward_input=[1] * 4, backward_weight=[1] * 4, activation=[5, 5, 1, 1]
    )
    found = balance(model, 7, placement=(0, 1), microbatches=2, effort=QUICK)
    assert found.split == (1, 3)
    assert max(found.found.peak_memory) <= 7


@pytest.mark.parametrize(
    ("times", "complaint"),
    [([1], "1 segments for 2 stages"), ([1, -2], "must be at least 0, got -2")],
)
def test_what_cannot_be_split_is_refused(times, complaint):
    """Too few layers, or costs that are none."""
    with pytest.raises(ScheduleError, match=complaint):
        balance(layers(times), placement=(0, 1), microbatches=2, effort=QUICK)
