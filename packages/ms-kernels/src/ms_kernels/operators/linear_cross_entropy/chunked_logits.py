"""Logits computed in chunks of rows in one buffer, and float32 sums of their gradients.

A chunk has at most `CHUNK_BYTES` of float32 logits. All chunks reuse one buffer, because allocating
memory would cost more than the arithmetic on it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ms_kernels.contracts.call import accumulator

CHUNK_BYTES = 64 * 2**20
"""Size of the logits of one chunk."""

TILE_ROWS = 8192
"""Rows of a half-precision weight that are converted to float32 at a time."""


def chunk_rows_of(hidden: Tensor, weight: Tensor) -> int:
    """Return the number of rows per chunk."""
    row_bytes = weight.shape[0] * accumulator(hidden.dtype).itemsize
    return max(CHUNK_BYTES // row_bytes, 1)


class GradientSums:
    """Gradients of hidden (N, H) and weight (V, H), summed in float32; None where not needed."""

    def __init__(self, hidden: Tensor, weight: Tensor, needed: tuple[bool, ...]) -> None:
        wide = accumulator(hidden.dtype)
        self.hidden = torch.zeros_like(hidden, dtype=wide) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None

    def add(
        self,
        grad: Tensor,  # (R, V), of the logits
        hidden: Tensor,  # (R, H)
        weight: Tensor,  # (V, H)
        rows: slice,
        factor: Tensor | None = None,  # (R, 1)
    ) -> None:
        """Add one chunk's gradients, scaled by `factor`; scaling H columns is cheaper than V."""
        if self.hidden is not None:
            grad_rows = self.hidden[rows]
            for columns, tile in _tiles(weight, grad.dtype):
                grad_rows.addmm_(grad[:, columns], tile)
            if factor is not None:
                grad_rows.mul_(factor)
        if self.weight is not None:
            scaled_hidden = hidden.to(grad.dtype)
            scaled_hidden = scaled_hidden if factor is None else scaled_hidden * factor
            self.weight.addmm_(grad.T, scaled_hidden)


def _tiles(weight: Tensor, wide: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield the weight in dtype `wide`: in one piece if it has that dtype, else tiles of rows."""
    step = len(weight) if weight.dtype == wide else TILE_ROWS
    for start in range(0, len(weight), step):
        columns = slice(start, start + step)
        yield columns, weight[columns].to(wide)


def chunks_of(hidden: Tensor, weight: Tensor, chunk_rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of rows of hidden (N, H) with their logits (R, V), all in one buffer.

    The product is computed in float32 (float64 for float64). The next chunk overwrites the logits.
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
