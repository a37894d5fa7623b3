"""Packs each segment where it fits best, in bounded memory.

A sample goes into the open row that it fills best; where it fits none, a new row is opened. Past
a bounded number of open rows the fullest one is closed. Nothing is sorted and no list of all
samples is held, so packing begins at once, mixes what it is given, and its whole state is the
open rows. (Best-fit decreasing, which sorts first, fills no better here and needs all lengths.)
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

from ms_data.streams.packer import OpenRow, Row, Segment


class BestFitPacker:
    """Packs segments into rows of `capacity` tokens; the same segments always give the same rows.

    Args:
        capacity: tokens in a row.
        window: rows that are open at a time; more of them fill better, with 0 each segment gets a
            row of its own.

    Raises:
        ValueError: `capacity` is below 1 or `window` below 0.
    """

    def __init__(self, capacity: int, *, window: int = 512) -> None:
        if capacity < 1 or window < 0:
            raise ValueError(f"capacity {capacity}, window {window}: give 1 and 0 or more")
        self._capacity, self._window = capacity, window
        self._open: dict[int, list[Segment]] = {}
        self._spaces: list[tuple[int, int]] = []  # (free tokens, row), sorted
        self.opened = 0
        """Rows opened so far."""

    def add(self, segment: Segment) -> list[Row]:
        """Place one segment; return the rows, at most one, that this closes.

        Raises:
            ValueError: the segment is empty or longer than a row.
        """
        size = segment.stop - segment.start
        if not 0 < size <= self._capacity:
            raise ValueError(
                f"{segment} has {size} tokens; a row has room for 1 to {self._capacity}"
            )
        at = bisect_left(self._spaces, (size, -1))
        if at < len(self._spaces):
            space, row = self._spaces.pop(at)
            self._open[row].append(segment)
        else:
            space, row = self._capacity, self.opened
            self._open[row] = [segment]
            self.opened += 1
        if space == size:
            return [tuple(self._open.pop(row))]
        insort(self._spaces, (space - size, row))
        if len(self._spaces) > self._window:
            return [tuple(self._open.pop(self._spaces.pop(0)[1]))]
        return []

    def flush(self) -> list[Row]:
        """Close all rows, in the order in which they were opened."""
        rows = [tuple(segments) for _, segments in sorted(self._open.items())]
        self._open, self._spaces = {}, []
        return rows

    @property
    def open_rows(self) -> tuple[OpenRow, ...]:
        """The whole state, but for `opened`: rows that have room left."""
        return tuple(OpenRow(row, tuple(segments)) for row, segments in sorted(self._open.items()))

    def restore(self, rows: Iterable[OpenRow], opened: int) -> None:
        """Go on from the `open_rows` and `opened` of another packer of this capacity.

        Raises:
            ValueError: the rows cannot be a packer's.
        """
        spaces, kept = [], {}
        for number, segments in rows:
            space = self._capacity - sum(stop - start for _, start, stop in segments)
            sound = all(sample >= 0 and 0 <= start < stop for sample, start, stop in segments)
            if not (segments and sound and space > 0 and 0 <= number < opened) or number in kept:
                raise ValueError(f"open row {number} cannot be one of this packer's")
            kept[number] = [Segment(*segment) for segment in segments]
            spaces.append((space, number))
        if len(spaces) > self._window:
            raise ValueError(f"{len(spaces)} open rows; this packer has {self._window}")
        self._open, self._spaces, self.opened = kept, sorted(spaces), opened


RULE = BestFitPacker
