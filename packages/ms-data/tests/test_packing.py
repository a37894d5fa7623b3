"""Packing keeps every segment exactly once, in bounded memory, and fills the rows."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_data.streams.packer import OpenRow, Packer, Segment, cut_sample
from ms_data.streams.packing_rules import PACKING_RULES
from ms_data.streams.packing_rules.best_fit import BestFitPacker

every_rule = pytest.mark.parametrize("rule", PACKING_RULES.values(), ids=PACKING_RULES)


def pack(
    rule: type[Packer], sizes: list[int], capacity: int, window: int
) -> list[tuple[Segment, ...]]:
    """Pack samples of these sizes and return all rows."""
    packer = rule(capacity, window=window)
    rows = [
        row for sample, size in enumerate(sizes) for row in packer.add(Segment(sample, 0, size))
    ]
    return rows + packer.flush()


@every_rule
@given(st.lists(st.integers(1, 32), max_size=200), st.integers(0, 9))
def test_every_segment_is_in_one_row_and_no_row_overflows(
    rule: type[Packer], sizes: list[int], window: int
) -> None:
    rows = pack(rule, sizes, 32, window)
    assert sorted(segment for row in rows for segment in row) == [
        Segment(sample, 0, size) for sample, size in enumerate(sizes)
    ]
    assert all(sum(stop - start for _, start, stop in row) <= 32 for row in rows)


@given(st.lists(st.integers(1, 32), max_size=120), st.integers(1, 9))
def test_best_fit_puts_each_segment_into_the_fullest_row_with_room(
    sizes: list[int], window: int
) -> None:
    """Compare with a brute-force scan of all open rows."""
    packer, open_rows, closed = BestFitPacker(32, window=window), dict[int, int](), []
    for sample, size in enumerate(sizes):
        closed += packer.add(Segment(sample, 0, size))
        candidates = [(space, row) for row, space in open_rows.items() if space >= size]
        space, row = min(candidates, default=(32, packer.opened - 1))
        open_rows[row] = space - size
        fullest = min((space, row) for row, space in open_rows.items())
        if open_rows[row] == 0:
            del open_rows[row]
        elif len(open_rows) > window:
            del open_rows[fullest[1]]
        used = {
            open_row.number: 32 - sum(p.stop - p.start for p in open_row.segments)
            for open_row in packer.open_rows
        }
        assert used == open_rows


@pytest.mark.parametrize("capacity", [512, 1024, 2048])
def test_rows_are_filled_to_99_percent(capacity: int) -> None:
    """Lognormal lengths, as in conversations, with 512 open rows."""
    lengths = np.random.default_rng(0).lognormal(4.5, 1.0, 40_000).astype(int)
    sizes = np.clip(lengths, 4, capacity).tolist()
    packer = BestFitPacker(capacity)
    rows = [
        row for sample, size in enumerate(sizes) for row in packer.add(Segment(sample, 0, size))
    ]
    used = sum(stop - start for row in rows for _, start, stop in row)
    assert used / (len(rows) * capacity) >= 0.99
    assert len(packer.open_rows) <= 512


@every_rule
@given(st.lists(st.integers(1, 32), min_size=1, max_size=80), st.data())
def test_open_rows_are_the_complete_state(
    rule: type[Packer], sizes: list[int], data: st.DataObject
) -> None:
    """A packer restored through JSON at any point produces the same rows."""
    stop = data.draw(st.integers(0, len(sizes)))
    packer = rule(32, window=4)
    rows = [
        row
        for sample, size in enumerate(sizes[:stop])
        for row in packer.add(Segment(sample, 0, size))
    ]
    saved = json.loads(json.dumps(packer.open_rows))
    restored = rule(32, window=4)
    restored.restore(
        (
            OpenRow(number, tuple(Segment(*segment) for segment in segments))
            for number, segments in saved
        ),
        packer.opened,
    )
    for sample, size in enumerate(sizes[stop:], stop):
        rows += restored.add(Segment(sample, 0, size))
    assert rows + restored.flush() == pack(rule, sizes, 32, 4)


def test_long_samples_are_truncated_or_split() -> None:
    """Parts cover the sample without overlap; samples that fit are unchanged."""
    assert cut_sample(7, 10, 4, split=False) == [Segment(7, 0, 4)]
    assert list(cut_sample(7, 10, 4, split=True)) == [
        Segment(7, 0, 4),
        Segment(7, 4, 8),
        Segment(7, 8, 10),
    ]
    assert cut_sample(7, 4, 4, split=True) == [Segment(7, 0, 4)]


@every_rule
def test_impossible_segments_and_states_are_refused(rule: type[Packer]) -> None:
    """Segments that are empty or longer than a row, and open rows that overflow."""
    with pytest.raises(ValueError, match="must have 1 to 4"):
        rule(4, window=2).add(Segment(0, 0, 5))
    with pytest.raises(ValueError, match="must have 1 to 4"):
        rule(4, window=2).add(Segment(0, 2, 2))
    with pytest.raises(ValueError, match="is not valid for this packer"):
        rule(4, window=2).restore([OpenRow(0, (Segment(0, 0, 4),))], 1)
