"""Reading two clocks as a pair."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_profile.clocks.clock_pair import ClockPair, read_clocks


def clock_from(values: list[int]) -> Callable[[], int]:
    """Return a clock that gives these readings one after the other."""
    return iter(values).__next__


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=5))
def test_the_true_offset_is_within_the_error_of_the_best_pair(
    waits: list[tuple[int, int]],
) -> None:
    """The error covers any delay before and after the wall clock reading."""
    monotonic: list[int] = []
    wall: list[int] = []
    now = 0
    for before, after in waits:
        monotonic.append(now)
        now += before
        wall.append(now + 10**9)
        now += after
        monotonic.append(now)
    pair = read_clocks(len(waits), monotonic=clock_from(monotonic), wall=clock_from(wall))
    assert abs(pair.offset_ns - 10**9) <= pair.error_ns
    assert pair.error_ns <= min(before + after for before, after in waits) // 2 + 1


def test_conversion_between_clocks_round_trips() -> None:
    """Converting to wall time and back gives the same time."""
    pair = ClockPair(100, 1_000_000, 1)
    assert pair.wall_of(150) == 1_000_050
    assert pair.monotonic_of(pair.wall_of(7)) == 7


def test_zero_readings_are_refused() -> None:
    """Zero tries give no pair."""
    with pytest.raises(ValueError, match="at least 1"):
        read_clocks(0)
