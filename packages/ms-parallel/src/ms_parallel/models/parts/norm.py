"""Root-mean-square norms."""

from typing import Protocol

import torch
from torch import Tensor, nn

from ms_parallel.operators.cpu import widen
from ms_parallel.operators.protocol import Ops


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim."""

    neutral = 1.0
    """Initial weight value."""

    def __init__(self, width: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), self.neutral))
        self.eps = eps
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., width) over its last dim."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + branch (..., width), and the sum normalized; in one pass if `ops` can.

        A hook, such as tensor parallelism's on this module, needs the module to be called.
        """
        add_rms_norm = getattr(self.ops, "add_rms_norm", None)  # of `ms_kernels`, not of `Ops`
        is_hooked = self._forward_hooks or self._forward_pre_hooks
        if add_rms_norm is None or is_hooked or type(self) is not RMSNorm:
            x = x + branch
            return x, self(x)
        normed, x = add_rms_norm(branch, x, self.weight, self.eps)
        return x, normed


class UnitOffsetNorm(RMSNorm):
    """Gemma's norm: scales by 1 + weight and computes in float32."""

    neutral = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., width) over its last dim."""
        # Scaled before it is rounded to the input's dtype, as in Gemma.
        return self.ops.rms_norm(widen(x), 1.0 + widen(self.weight), self.eps).to(x.dtype)


class WidthSplit(Protocol):
    """Split of a norm's width over processes."""

    def total(self, sums: Tensor) -> Tensor:
        """Sum over processes."""

    def local(self, weight: Tensor) -> Tensor:
        """Return this process's part of a weight."""


class FullWidthNorm(RMSNorm):
    """Norm over the full width; under tensor parallelism `across` is set and sums over ranks."""

    def __init__(self, width: int, eps: float, ops: Ops) -> None:
        super().__init__(width, eps, ops)
        self.width = width
        self.across: WidthSplit | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., width), or this process's shard of its last dim."""
        if self.across is None:
            return super().forward(x)
        wide = widen(x)
        mean = self.across.total(wide.square().sum(-1, keepdim=True)) / self.width  # (..., 1)
        normed = wide * (mean + self.eps).rsqrt() * self.across.local(self.weight)
        return normed.to(x.dtype)
