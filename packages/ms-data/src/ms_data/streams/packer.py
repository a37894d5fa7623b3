"""The packer interface: packers assign segments of samples to rows, one segment at a time.

The modules of `packing_rules` implement it.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Segment(NamedTuple):
    """Tokens `start` to `stop` of one sample."""

    sample: int
    """Sample index, as numbered by the caller."""
    start: int
    stop: int


Row = tuple[Segment, ...]
"""Segments of one batch row."""


class OpenRow(NamedTuple):
    """A row with free space."""

    number: int
    """Number of rows opened before it."""
    segments: Row


class Packer(Protocol):
    """Assigns segments to rows, deterministically."""

    opened: int
    """Number of rows opened so far."""

    def __init__(self, capacity: int, *, window: int) -> None:
        """Pack rows of `capacity` tokens, with at most `window` open rows."""

    def add(self, segment: Segment) -> list[Row]:
        """Place one segment of 1 to `capacity` tokens; return the rows that this closes."""
        ...

    def flush(self) -> list[Row]:
        """Close all rows, in the order in which they were opened."""
        ...

    @property
    def open_rows(self) -> tuple[OpenRow, ...]:
        """The complete state apart from `opened`: rows with free space."""
        ...

    def restore(self, rows: Iterable[OpenRow], opened: int) -> None:
        """Continue from the `open_rows` and `opened` of another packer with this capacity.

        Raises:
            ValueError: the rows are not a valid packer state.
        """
        ...


def cut_sample(sample: int, size: int, capacity: int, *, split: bool) -> list[Segment]:
    """Cut a sample into segments of `capacity` tokens; without `split`, keep only the first."""
    if size <= capacity:
        return [Segment(sample, 0, size)]
    stop = size if split else capacity
    return [
        Segment(sample, start, min(stop, start + capacity)) for start in range(0, stop, capacity)
    ]
