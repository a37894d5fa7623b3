"""Root-mean-square norms."""

from typing import Protocol

import torch
from torch import Tensor, nn

from ms_parallel.operators.cpu import widen
from ms_parallel.operators.protocol import Ops


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim."""

    neutral = 1.0
    """What fresh weights are."""

    def __init__(self, width: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), self.neutral))
        self.eps = eps
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """Norm x over its last dim, (..., width) to the same."""
        return self.ops.rms_norm(x, self.weight, self.eps)


class UnitOffsetNorm(RMSNorm):
    """Gemma's norm: multiplies by 1 + weight, in float32 until the end."""

    neutral = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Norm x over its last dim, (..., width) to the same."""
        return self.ops.rms_norm(widen(x), 1.0 + widen(self.weight), self.eps).to(x.dtype)


class Across(Protocol):
    """Where a width is split over processes."""

    def total(self, sums: Tensor) -> Tensor:
        """Add up every process's sums."""

    def local(self, weight: Tensor) -> Tensor:
        """Take this process's part of a weight."""


class WholeWidthNorm(RMSNorm):
    """A norm over a width that may be split over processes; set `across` where it is."""

    def __init__(self, width: int, eps: float, ops: Ops) -> None:
        super().__init__(width, eps, ops)
        self.width = width
        self.across: Across | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Norm x, (..., width, or this process's part of it) to the same."""
        if self.across is None:
            return super().forward(x)
        wide = widen(x)
        mean = self.across.total(wide.square().sum(-1, keepdim=True)) / self.width
        normed = wide * (mean + self.eps).rsqrt() * self.across.local(self.weight)
        return normed.to(x.dtype)
