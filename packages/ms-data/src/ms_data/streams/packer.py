"""Defines packers, which place segments of samples in rows, one segment at a time.

The folder `packing_rules` holds the rules, a module each.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Segment(NamedTuple):
    """Tokens `start` to `stop` of one sample."""

    sample: int
    """Number of the sample, counted by whoever packs."""
    start: int
    stop: int


Row = tuple[Segment, ...]
"""The segments of one row of a batch."""


class OpenRow(NamedTuple):
    """A row that has room left."""

    number: int
    """Rows opened before it."""
    segments: Row


class Packer(Protocol):
    """Places segments in rows; the same segments always give the same rows."""

    opened: int
    """Rows opened so far."""

    def __init__(self, capacity: int, *, window: int) -> None:
        """Pack rows of `capacity` tokens, of which at most `window` are open at a time."""

    def add(self, segment: Segment) -> list[Row]:
        """Place one segment of 1 to `capacity` tokens; return the rows that this closes."""
        ...

    def flush(self) -> list[Row]:
        """Close all rows, in the order in which they were opened."""
        ...

    @property
    def open_rows(self) -> tuple[OpenRow, ...]:
        """The whole state, but for `opened`: rows that have room left."""
        ...

    def restore(self, rows: Iterable[OpenRow], opened: int) -> None:
        """Go on from the `open_rows` and `opened` of another packer of this capacity.

        Raises:
            ValueError: the rows cannot be a packer's.
        """
        ...


def cut_sample(sample: int, size: int, capacity: int, *, split: bool) -> list[Segment]:
    """Cut a sample into segments: one where it fits, else its beginning or, to `split` it, all."""
    if size <= capacity:
        return [Segment(sample, 0, size)]
    stop = size if split else capacity
    return [
        Segment(sample, start, min(stop, start + capacity)) for start in range(0, stop, capacity)
    ]
