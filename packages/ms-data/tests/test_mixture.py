"""Mixture counts: no source is ever off by more than one sample."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_data import Mixture, Phase
from ms_data.errors import SettingError, StateError

WEIGHT = st.floats(0, 10, allow_subnormal=False)
WEIGHTS = st.integers(1, 7).flatmap(
    lambda count: st.lists(
        st.tuples(
            st.integers(1, 40),
            st.lists(WEIGHT, min_size=count, max_size=count).filter(lambda w: sum(w) > 1e-3),
        ),
        min_size=1,
        max_size=6,
    )
)
# Weights are rounded to multiples of 2**-32 that sum to 1, so dues are exact; `due` returns floats.
TOLERANCE = 1e-6


def max_deviation(mixture: Mixture) -> float:
    """Return the largest deviation of a source's count from its due."""
    due = mixture.due(mixture.position)
    return max(abs(due[name] - count) for name, count in mixture.counts.items())


@settings(max_examples=150, deadline=None)
@given(WEIGHTS)
def test_planned_phases_keep_every_source_within_one_sample(
    plan: list[tuple[int, list[float]]],
) -> None:
    """Tijdeman's bound, for any weights and phase changes."""
    start, phases = 0, []
    for length, weights in plan:
        phases.append(Phase(start, weights))
        start += length
    mixture = Mixture([str(number) for number in range(len(plan[0][1]))], phases)
    for _ in range(start + 60):
        mixture.draw()
        assert max_deviation(mixture) < 1
    assert sum(mixture.counts.values()) == mixture.position == start + 60


@settings(max_examples=150, deadline=None)
@given(WEIGHTS)
def test_unplanned_weight_changes_keep_every_source_within_one_sample(
    plan: list[tuple[int, list[float]]],
) -> None:
    """A change takes effect within n - 1 samples."""
    count = len(plan[0][1])
    mixture = Mixture([str(number) for number in range(count)], plan[0][1])
    for length, weights in plan:
        position = mixture.position
        assert position <= mixture.change(weights) < position + count
        for _ in range(length):
            mixture.draw()
            assert max_deviation(mixture) <= 1 + TOLERANCE
    due = mixture.due(mixture.position)
    assert sum(due.values()) == pytest.approx(mixture.position, abs=TOLERANCE)


def test_due_is_the_sum_of_the_weights() -> None:
    """Compare with plain sums at a prefix in each phase."""
    phases = [Phase(0, [3, 1]), Phase(100, [0, 1]), Phase(150, [1, 1])]
    mixture = Mixture(["a", "b"], phases)
    assert mixture.due(100) == pytest.approx({"a": 75, "b": 25}, abs=TOLERANCE)
    assert mixture.due(150) == pytest.approx({"a": 75, "b": 75}, abs=TOLERANCE)
    assert mixture.due(160) == pytest.approx({"a": 80, "b": 80}, abs=TOLERANCE)
    drawn = [mixture.draw() for _ in range(160)]
    assert drawn[100:150] == [1] * 50
    assert (drawn.count(0), drawn.count(1)) == (80, 80)


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(0, 50), st.integers(0, 50))
def test_a_restored_mixture_continues_identically(
    plan: list[tuple[int, list[float]]], first: int, second: int
) -> None:
    """Through JSON, before and during a weight change."""
    names = [str(number) for number in range(len(plan[0][1]))]
    mixture = Mixture(names, plan[0][1])
    for _ in range(first):
        mixture.draw()
    mixture.change(plan[-1][1])
    for _ in range(second % (len(names) + 1)):
        mixture.draw()
    restored = Mixture(names)
    restored.load_state_dict(json.loads(json.dumps(mixture.state_dict())))
    mixture.change(plan[0][1])
    restored.change(plan[0][1])
    assert [mixture.draw() for _ in range(80)] == [restored.draw() for _ in range(80)]
    assert restored.counts == mixture.counts


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.0, 0.0], "at least one weight must be above 0"),
        ([1.0, -1.0], "0 or more"),
        ([1.0, float("nan")], "0 or more"),
        ([1.0], "0 or more for each"),
        ([Phase(3, [1, 1])], "must start at 0"),
    ],
)
def test_invalid_weights_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Mixture(["a", "b"], weights)


def test_a_state_with_other_sources_is_refused() -> None:
    """Source names must match, and counts must be valid."""
    state = Mixture(["a", "b"]).state_dict()
    with pytest.raises(StateError, match="has sources"):
        Mixture(["a", "c"]).load_state_dict(state)
    with pytest.raises(StateError, match="damaged"):
        Mixture(["a", "b"]).load_state_dict({**state, "counts": [-1, 1]})


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.integers(1, 5))
def test_limits_hold_at_every_prefix(data: st.DataObject, size: int) -> None:
    """No source exceeds its limit or deviates from its due; a restored mixture agrees."""
    names = [str(number) for number in range(size)]
    weight = st.sampled_from([0.5, 1.0, 2.0, 0.3])
    limits = data.draw(st.dictionaries(st.sampled_from(names), st.integers(0, 40)))
    weights = st.lists(weight, min_size=size, max_size=size)
    mixture = Mixture(names, data.draw(weights), limits=limits)
    for _ in range(80):
        if mixture.position == mixture.end:
            break
        mixture.draw()
        due = mixture.due(mixture.position)
        for name, drawn in mixture.counts.items():
            assert abs(drawn - due[name]) < 1
            assert drawn <= limits.get(name, 80)
        if data.draw(st.integers(0, 19)) == 0:
            mixture.change(data.draw(weights))
            loaded = Mixture(names, limits=limits)
            loaded.load_state_dict(mixture.state_dict())
            assert loaded.end == mixture.end
            mixture = loaded
    else:
        assert mixture.end is None or mixture.end >= 80
