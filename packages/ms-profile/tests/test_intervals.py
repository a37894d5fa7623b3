"""Interval arithmetic agrees with sets of whole instants."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ms_profile.trace.intervals import intersect, length_ns, subtract, union

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)), max_size=12)


def of(pairs: list[tuple[int, int]]) -> np.ndarray:
    """Union of (start, length) pairs."""
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return union(table[:, 0], table[:, 0] + table[:, 1])


def instants(pairs: list[tuple[int, int]]) -> set[int]:
    """The slow truth: every whole instant that a pair covers."""
    return {t for start, length in pairs for t in range(start, start + length)}


def covered(intervals: np.ndarray) -> set[int]:
    """Instants of disjoint intervals."""
    return {t for start, end in intervals.tolist() for t in range(start, end)}


@given(spans, spans)
def test_union_intersection_and_difference_are_those_of_sets(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    """Union, intersection and difference cover what the sets of instants hold, disjointly."""
    a, b = of(left), of(right)
    for found, truth in (
        (a, instants(left)),
        (intersect(a, b), instants(left) & instants(right)),
        (subtract(a, b), instants(left) - instants(right)),
    ):
        assert covered(found) == truth
        assert length_ns(found) == len(truth)
