"""Root-mean-square norms."""

import torch
from torch import Tensor, nn

from ms_parallel.operators.protocol import Ops

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim."""

    def __init__(self, width: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same."""
        return self.ops.rms_norm(x, self.weight, self.eps)
