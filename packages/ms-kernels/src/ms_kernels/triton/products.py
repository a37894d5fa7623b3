"""Matrix products of half-precision matrices whose results stay in float32."""

import torch
from torch import Tensor

__all__ = ["add_product", "product"]

WIDENING = frozenset({"cuda"})
"""Device types whose matrix library sums and returns float32 from half-precision factors."""


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` in float32."""
    if left.dtype != torch.float32 and left.device.type in WIDENING:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.to(torch.float32) @ right.to(torch.float32)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to `total`, which is float32."""
    if left.dtype != torch.float32 and left.device.type in WIDENING:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.to(torch.float32), right.to(torch.float32))
