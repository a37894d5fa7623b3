"""Best-fit packing in bounded memory.

A segment goes into the open row with the least space that still fits it; if none fits, a new row is
opened. When there are too many open rows, the fullest one is closed. Nothing is sorted and no list
of all samples is needed, so packing starts at once and its state is just the open rows. Best-fit
decreasing, which sorts first, does not fill better here and needs all lengths.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

from ms_data.arguments import check_integer, check_items, check_type
from ms_data.errors import SettingError
from ms_data.streams.packer import OpenRow, Row, Segment


class BestFitPacker:
    """Packs segments into rows of `capacity` tokens, deterministically.

    Args:
        capacity: tokens per row.
        window: maximum number of open rows. More rows fill better; 0 gives every segment its own
            row.

    Raises:
        SettingError: `capacity` is below 1 or `window` below 0.
    """

    def __init__(self, capacity: int, *, window: int = 512) -> None:
        check_integer("capacity", capacity, minimum=1, error=SettingError)
        check_integer("window", window, minimum=0, error=SettingError)
        self._capacity, self._window = capacity, window
        self._open: dict[int, list[Segment]] = {}
        self._spaces: list[tuple[int, int]] = []  # (free tokens, row), sorted
        self.opened = 0
        """Number of rows opened so far."""

    def add(self, segment: Segment) -> list[Row]:
        """Place one segment; return the rows that this closes, at most one.

        Raises:
            ValueError: the segment is empty or longer than a row.
        """
        check_type("segment", segment, Segment, "a Segment", error=SettingError)
        size = segment.stop - segment.start
        if not 0 < size <= self._capacity:
            raise ValueError(
                f"{segment} has {size} tokens, must have 1 to {self._capacity} to fit in a row"
            )
        # The first entry with at least `size` free tokens is the best fit.
        index = bisect_left(self._spaces, (size, -1))
        if index < len(self._spaces):
            space, row = self._spaces.pop(index)
            self._open[row].append(segment)
        else:
            space, row = self._capacity, self.opened
            self._open[row] = [segment]
            self.opened += 1
        if space == size:  # the row is full
            return [tuple(self._open.pop(row))]
        insort(self._spaces, (space - size, row))
        if len(self._spaces) > self._window:  # close the fullest row
            return [tuple(self._open.pop(self._spaces.pop(0)[1]))]
        return []

    def flush(self) -> list[Row]:
        """Close all rows, in the order in which they were opened."""
        rows = [tuple(segments) for _, segments in sorted(self._open.items())]
        self._open, self._spaces = {}, []
        return rows

    @property
    def open_rows(self) -> tuple[OpenRow, ...]:
        """The complete state apart from `opened`: rows with free space."""
        return tuple(OpenRow(row, tuple(segments)) for row, segments in sorted(self._open.items()))

    def restore(self, rows: Iterable[OpenRow], opened: int) -> None:
        """Continue from the `open_rows` and `opened` of another packer with this capacity.

        Raises:
            ValueError: the rows are not a valid packer state.
        """
        check_integer("opened", opened, minimum=0, error=SettingError)
        check_type("rows", rows, Iterable, "OpenRows", error=SettingError)
        rows = list(rows)
        check_items("rows", rows, OpenRow, "OpenRows", error=SettingError)
        spaces, open_segments = [], {}
        for number, segments in rows:
            space = self._capacity - sum(stop - start for _, start, stop in segments)
            valid = all(sample >= 0 and 0 <= start < stop for sample, start, stop in segments)
            if (
                not (segments and valid and space > 0 and 0 <= number < opened)
                or number in open_segments
            ):
                raise ValueError(f"open row {number} is not valid for this packer")
            open_segments[number] = [Segment(*segment) for segment in segments]
            spaces.append((space, number))
        if len(spaces) > self._window:
            raise ValueError(f"{len(spaces)} open rows, but this packer allows {self._window}")
        self._open, self._spaces, self.opened = open_segments, sorted(spaces), opened


RULE = BestFitPacker
