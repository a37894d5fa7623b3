"""Interval arithmetic matches sets of integer instants."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ms_profile.trace.intervals import intersect, length_ns, subtract, union

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)), max_size=12)


def intervals_of(pairs: list[tuple[int, int]]) -> np.ndarray:
    """Return the union of (start, length) pairs."""
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return union(table[:, 0], table[:, 0] + table[:, 1])


def instants(pairs: list[tuple[int, int]]) -> set[int]:
    """Return every integer instant that a pair covers; the slow reference."""
    return {t for start, length in pairs for t in range(start, start + length)}


def covered(intervals: np.ndarray) -> set[int]:
    """Return the instants of disjoint intervals."""
    return {t for start, end in intervals.tolist() for t in range(start, end)}


@given(spans, spans)
def test_union_intersection_and_difference_match_sets(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    """They cover the same instants as the sets, and the intervals are disjoint."""
    a, b = intervals_of(left), intervals_of(right)
    for result, expected in (
        (a, instants(left)),
        (intersect(a, b), instants(left) & instants(right)),
        (subtract(a, b), instants(left) - instants(right)),
    ):
        assert covered(result) == expected
        assert length_ns(result) == len(expected)
