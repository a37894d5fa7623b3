"""Logits of a few rows at a time, and what their half-precision gradients add up to."""

import torch
from torch import Tensor

from ms_kernels.triton.products import add_product, product

__all__ = ["CHUNK_BYTES", "LIFT", "Sums", "chunk_rows_of", "lifted"]

CHUNK_BYTES = 2**30
"""Size of a chunk's float32 logits. Each chunk reads and writes the weight's whole gradient, so
that small ones cost more time than they save memory."""

LIFT = {torch.float16: 2.0**13}
"""Factor of a chunk's gradient by dtype: a probability of 1e-5 would be subnormal in float16."""


def chunk_rows_of(weight: Tensor) -> int:
    """Return how many rows of logits are held at once."""
    return max(CHUNK_BYTES // (4 * weight.shape[0]), 1)


def lifted(grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a common factor of the rows' gradients, and what remains of them, lifted.

    With float16 the largest remainder is 1, so that a loss scale cannot make one overflow.
    """
    if dtype not in LIFT or not grad.numel():
        return grad.new_ones(()), grad
    peak = grad.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    return peak, grad / peak * LIFT[dtype]


class Sums:
    """Gradients of hidden (N, H) and weight (V, H), summed in float32, each None if not wanted."""

    def __init__(self, hidden: Tensor, weight: Tensor, wanted: tuple[bool, ...]) -> None:
        self.hidden = hidden.new_empty(hidden.shape, dtype=torch.float32) if wanted[0] else None
        self.weight = weight.new_zeros(weight.shape, dtype=torch.float32) if wanted[1] else None

    def add(self, gradient: Tensor, hidden: Tensor, weight: Tensor, rows: slice) -> None:
        """Spend one chunk's gradient (R, V), of the inputs' dtype."""
        if self.hidden is not None:
            self.hidden[rows] = product(gradient, weight)
        if self.weight is not None:
            add_product(self.weight, gradient.T, hidden)
