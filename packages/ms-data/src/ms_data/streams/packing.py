"""Best-fit packing of samples into rows, one sample at a time, in bounded memory.

A sample goes into the open row that it fills best; where it fits none, a new row is opened. Past
a bounded number of open rows the fullest one is closed. Nothing is sorted and no list of all
samples is held, so packing begins at once, mixes what it is given, and its whole state is the
open rows. (Best-fit decreasing, which sorts first, fills no better here and needs all lengths.)
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from attrs import field, frozen
from attrs.validators import ge

__all__ = ["OpenRow", "Packer", "Piece", "cut"]


class Piece(NamedTuple):
    """Tokens `start` to `stop` of one sample."""

    sample: int
    """Number of the sample, counted by whoever packs."""
    start: int
    stop: int


class OpenRow(NamedTuple):
    """A row that has room left."""

    number: int
    """Rows opened before it."""
    pieces: tuple[Piece, ...]


@frozen(kw_only=True)
class _Limits:
    capacity: int = field(validator=ge(1))
    window: int = field(validator=ge(1))


class Packer:
    """Packs pieces into rows of `capacity` tokens; the same pieces always give the same rows.

    Args:
        capacity: tokens in a row.
        window: rows that are open at a time; more of them fill better.

    Raises:
        ValueError: an argument is below 1.
    """

    def __init__(self, capacity: int, *, window: int = 512) -> None:
        self._limits = _Limits(capacity=capacity, window=window)
        self._open: dict[int, list[Piece]] = {}
        self._spaces: list[tuple[int, int]] = []  # (free tokens, row), sorted
        self._opened = 0

    @property
    def capacity(self) -> int:
        """Tokens in a row."""
        return self._limits.capacity

    def add(self, piece: Piece) -> list[tuple[Piece, ...]]:
        """Places one piece; returns the rows, at most one, that this closes.

        Raises:
            ValueError: the piece is empty or longer than a row.
        """
        size = piece.stop - piece.start
        if not 0 < size <= self.capacity:
            raise ValueError(f"{piece} has {size} tokens; a row has room for 1 to {self.capacity}")
        at = bisect_left(self._spaces, (size, -1))
        if at < len(self._spaces):
            space, row = self._spaces.pop(at)
            self._open[row].append(piece)
        else:
            space, row = self.capacity, self._opened
            self._open[row] = [piece]
            self._opened += 1
        if space == size:
            return [tuple(self._open.pop(row))]
        insort(self._spaces, (space - size, row))
        if len(self._spaces) > self._limits.window:
            return [tuple(self._open.pop(self._spaces.pop(0)[1]))]
        return []

    def flush(self) -> list[tuple[Piece, ...]]:
        """Closes all rows, in the order in which they were opened."""
        rows = [tuple(pieces) for _, pieces in sorted(self._open.items())]
        self._open, self._spaces = {}, []
        return rows

    @property
    def opened(self) -> int:
        """Rows opened so far."""
        return self._opened

    @property
    def open_rows(self) -> tuple[OpenRow, ...]:
        """The whole state, but for `opened`: rows that have room left."""
        return tuple(OpenRow(row, tuple(pieces)) for row, pieces in sorted(self._open.items()))

    def restore(self, rows: Iterable[OpenRow], opened: int) -> None:
        """Goes on from the `open_rows` and `opened` of another packer of this capacity.

        Raises:
            ValueError: the rows cannot be a packer's.
        """
        spaces, kept = [], {}
        for number, pieces in rows:
            space = self.capacity - sum(stop - start for _, start, stop in pieces)
            sound = all(sample >= 0 and 0 <= start < stop for sample, start, stop in pieces)
            if not (pieces and sound and space > 0 and 0 <= number < opened) or number in kept:
                raise ValueError(f"open row {number} cannot be one of this packer's")
            kept[number] = [Piece(*piece) for piece in pieces]
            spaces.append((space, number))
        if len(spaces) > self._limits.window:
            raise ValueError(f"{len(spaces)} open rows; this packer has {self._limits.window}")
        self._open, self._spaces, self._opened = kept, sorted(spaces), opened


def cut(sample: int, size: int, capacity: int, *, split: bool) -> Sequence[Piece]:
    """The pieces of a sample: itself where it fits, else its beginning, or all of its parts."""
    if size <= capacity:
        return (Piece(sample, 0, size),)
    if not split:
        return (Piece(sample, 0, capacity),)
    return [Piece(sample, start, min(size, start + capacity)) for start in range(0, size, capacity)]
