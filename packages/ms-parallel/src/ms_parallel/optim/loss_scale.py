"""Loss scaling in float16, which keeps small gradients from rounding to zero.

The loss is multiplied by a power of two before the backward, and the summed float32 gradients are
divided by it; both are exact. If a gradient overflows on any process, all processes see it in the
gradient norm, skip the update and halve the scale. After enough consecutive updates without
overflow the scale is doubled (Micikevicius et al., 2018, arXiv:1710.03740).
"""

import math
from typing import Any

import torch
from torch import Tensor

from ms_parallel.optim.loss_scale_settings import MIN_SCALE, LossScale
from ms_parallel.torch_private import foreach_mul_


class LossScaler:
    """Current loss scale; the same on every process, since all see the same gradient norm.

    Args:
        settings: loss scaling settings; None leaves gradients unscaled.
    """

    def __init__(self, settings: LossScale | None) -> None:
        self.settings = settings
        self.factor = settings.initial if settings else 1.0
        """Factor on gradients in the next update; a power of two."""
        self.good = self.bad = 0
        self.skipped = 0
        """Updates skipped because of overflow, over all launches."""

    @property
    def state(self) -> Tensor:
        """State as (4,) float64 on the CPU, which represents each number exactly."""
        numbers = (self.factor if self.settings else 0.0, self.good, self.bad, self.skipped)
        return torch.tensor(numbers, dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Load a `state`; if it is from a run without loss scaling, only its counts."""
        factor, good, bad, skipped = state.tolist()
        self.good, self.bad, self.skipped = int(good), int(bad), int(skipped)
        if self.settings is not None and factor:
            self.factor = factor

    def may_overflow(self, loss: float) -> bool:
        """Whether a non-finite gradient may be an overflow that a smaller scale would avoid."""
        return self.settings is not None and self.factor > MIN_SCALE and math.isfinite(loss)

    def unscale(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Divide gradients by the scale, in place."""
        if self.factor != 1.0:
            # The scale is a power of two, so this changes only the exponents.
            foreach_mul_(list(gradients.values()), 1.0 / self.factor)
        return gradients

    def adjust(self, *, overflow: bool) -> None:
        """Adjust the scale after a performed update, or one skipped because of overflow."""
        if self.settings is None:
            return
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.skipped += 1
            self.bad += 1
            if self.bad >= self.settings.hysteresis:
                self.factor, self.bad = max(MIN_SCALE, self.factor / 2), 0
        elif self.good >= self.settings.growth_interval:
            self.factor, self.good, self.bad = self.factor * 2, 0, 0


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return `x` unchanged, with its gradient multiplied by `factor`."""
    scaled: Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return scaled


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
