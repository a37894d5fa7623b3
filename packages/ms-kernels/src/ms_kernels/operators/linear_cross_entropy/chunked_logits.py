"""Logits of a few rows at a time, in one buffer, and what their gradients add up to.

Rows are taken in chunks whose float32 logits fill at most `CHUNK_BYTES`. Every chunk uses the same
buffer in turn: fresh memory costs more than the arithmetic on it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ms_kernels.contracts.call import accumulator

CHUNK_BYTES = 64 * 2**20
"""Size of the logits that are held at once."""

TILE_ROWS = 8192
"""Rows of a half-precision weight that are widened at once."""


def chunk_rows_of(hidden: Tensor, weight: Tensor) -> int:
    """Return how many rows of logits are held at once."""
    row_bytes = weight.shape[0] * accumulator(hidden.dtype).itemsize
    return max(CHUNK_BYTES // row_bytes, 1)


class Sums:
    """Gradients of hidden (N, H) and weight (V, H), summed in float32, each None if not wanted."""

    def __init__(self, hidden: Tensor, weight: Tensor, wanted: tuple[bool, ...]) -> None:
        wide = accumulator(hidden.dtype)
        self.hidden = torch.zeros_like(hidden, dtype=wide) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None

    def add(
        self,
        grad: Tensor,  # (R, V), of the logits
        hidden: Tensor,  # (R, H)
        weight: Tensor,  # (V, H)
        rows: slice,
        factor: Tensor | None = None,  # (R, 1)
    ) -> None:
        """Add one chunk's gradients, each row times `factor`, which here meets H columns, not V."""
        if self.hidden is not None:
            part = self.hidden[rows]
            for columns, tile in _tiles(weight, grad.dtype):
                part.addmm_(grad[:, columns], tile)
            if factor is not None:
                part.mul_(factor)
        if self.weight is not None:
            scaled = hidden.to(grad.dtype)
            scaled = scaled if factor is None else scaled * factor
            self.weight.addmm_(grad.T, scaled)


def _tiles(weight: Tensor, wide: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield the weight in `wide`: whole if it is so already, else a few rows at a time."""
    step = len(weight) if weight.dtype == wide else TILE_ROWS
    for start in range(0, len(weight), step):
        columns = slice(start, start + step)
        yield columns, weight[columns].to(wide)


def chunks_of(hidden: Tensor, weight: Tensor, chunk_rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield some rows of hidden (N, H) at a time and their logits (R, V), all in one buffer.

    Logits are multiplied and summed in float32 (float64 for float64); the next ones replace them.
    """
    wide = accumulator(hidden.dtype)
    buffer = hidden.new_empty((min(chunk_rows, len(hidden)), len(weight)), dtype=wide)
    for start in range(0, len(hidden), chunk_rows):
        rows = slice(start, start + chunk_rows)
        chunk = hidden[rows]
        logits = buffer[: len(chunk)]
        for columns, tile in _tiles(weight, wide):
            torch.mm(chunk.to(wide), tile.T, out=logits[:, columns])
        yield rows, logits
