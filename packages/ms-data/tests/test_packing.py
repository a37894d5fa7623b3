"""Packing keeps every segment once, in bounded memory, and fills rows."""

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
    """All rows of some samples."""
    packer = rule(capacity, window=window)
    rows = [row for at, size in enumerate(sizes) for row in packer.add(Segment(at, 0, size))]
    return rows + packer.flush()


@every_rule
@given(st.lists(st.integers(1, 32), max_size=200), st.integers(0, 9))
def test_every_segment_is_in_one_row_and_no_row_overflows(
    rule: type[Packer], sizes: list[int], window: int
) -> None:
    """Nothing is lost, repeated, cut or squeezed in."""
    rows = pack(rule, sizes, 32, window)
    assert sorted(segment for row in rows for segment in row) == [
        Segment(at, 0, size) for at, size in enumerate(sizes)
    ]
    assert all(sum(stop - start for _, start, stop in row) <= 32 for row in rows)


@given(st.lists(st.integers(1, 32), max_size=120), st.integers(1, 9))
def test_each_segment_goes_where_it_fits_best(sizes: list[int], window: int) -> None:
    """Held against a scan of all open rows."""
    packer, open_rows, closed = BestFitPacker(32, window=window), dict[int, int](), []
    for at, size in enumerate(sizes):
        closed += packer.add(Segment(at, 0, size))
        fitting = [(space, row) for row, space in open_rows.items() if space >= size]
        space, row = min(fitting, default=(32, packer.opened - 1))
        open_rows[row] = space - size
        full = min((space, row) for row, space in open_rows.items())
        if open_rows[row] == 0:
            del open_rows[row]
        elif len(open_rows) > window:
            del open_rows[full[1]]
        used = {
            one.number: 32 - sum(p.stop - p.start for p in one.segments) for one in packer.open_rows
        }
        assert used == open_rows


@pytest.mark.parametrize("capacity", [512, 1024, 2048])
def test_rows_are_filled_to_99_percent(capacity: int) -> None:
    """Lengths as conversations have them (lognormal), 512 open rows."""
    lengths = np.random.default_rng(0).lognormal(4.5, 1.0, 40_000).astype(int)
    sizes = np.clip(lengths, 4, capacity).tolist()
    packer = BestFitPacker(capacity)
    rows = [row for at, size in enumerate(sizes) for row in packer.add(Segment(at, 0, size))]
    used = sum(stop - start for row in rows for _, start, stop in row)
    assert used / (len(rows) * capacity) >= 0.99
    assert len(packer.open_rows) <= 512


@every_rule
@given(st.lists(st.integers(1, 32), min_size=1, max_size=80), st.data())
def test_open_rows_are_the_whole_state(
    rule: type[Packer], sizes: list[int], data: st.DataObject
) -> None:
    """Restored anywhere through JSON, the rows are those of an undisturbed packer."""
    stop = data.draw(st.integers(0, len(sizes)))
    packer = rule(32, window=4)
    rows = [r for at, size in enumerate(sizes[:stop]) for r in packer.add(Segment(at, 0, size))]
    kept = json.loads(json.dumps(packer.open_rows))
    again = rule(32, window=4)
    again.restore(
        (OpenRow(number, tuple(Segment(*p) for p in segments)) for number, segments in kept),
        packer.opened,
    )
    for at, size in enumerate(sizes[stop:], stop):
        rows += again.add(Segment(at, 0, size))
    assert rows + again.flush() == pack(rule, sizes, 32, 4)


def test_a_long_sample_is_cut_off_or_in_parts() -> None:
    """Parts cover it without overlap; what fits is left alone."""
    assert cut_sample(7, 10, 4, split=False) == [Segment(7, 0, 4)]
    assert list(cut_sample(7, 10, 4, split=True)) == [
        Segment(7, 0, 4),
        Segment(7, 4, 8),
        Segment(7, 8, 10),
    ]
    assert cut_sample(7, 4, 4, split=True) == [Segment(7, 0, 4)]


@every_rule
def test_a_segment_that_fits_no_row_and_a_foreign_state_are_refused(rule: type[Packer]) -> None:
    """Longer than a row, empty, or open rows that overflow."""
    with pytest.raises(ValueError, match="must have 1 to 4"):
        rule(4, window=2).add(Segment(0, 0, 5))
    with pytest.raises(ValueError, match="must have 1 to 4"):
        rule(4, window=2).add(Segment(0, 2, 2))
    with pytest.raises(ValueError, match="is not valid for this packer"):
        rule(4, window=2).restore([OpenRow(0, (Segment(0, 0, 4),))], 1)
