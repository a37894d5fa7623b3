"""Rows a block at a time, so that a chain of simple operations finds its operands in the cache."""

from collections.abc import Iterator

__all__ = ["BLOCK_BYTES", "blocks"]

BLOCK_BYTES = 2**20
"""Of one operand, at four bytes an element: a few of them share a second-level cache."""


def blocks(rows: int, width: int) -> Iterator[slice]:
    """Yield the slices that cut `rows` rows of `width` elements into blocks."""
    step = max(BLOCK_BYTES // (4 * max(width, 1)), 1)
    for start in range(0, rows, step):
        yield slice(start, start + step)
