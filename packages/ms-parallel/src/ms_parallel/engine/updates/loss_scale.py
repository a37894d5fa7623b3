"""The scale of a loss in float16, without which small gradients would round to zero.

The loss is multiplied by a power of two before its backward, and the summed gradients, in float32,
are divided by it again: both are exact. A gradient that overflows is not finite on some process;
all of them learn of it with the gradient's norm, skip the update and halve the scale. After enough
updates in a row without one it is doubled (Micikevicius et al., 2018, arXiv:1710.03740).
"""

import math
from typing import Any

import torch
from torch import Tensor

from ms_parallel.engine.updates.settings import LEAST, LossScale
from ms_parallel.torch_private import foreach_mul_


class LossScaler:
    """The scale as it moves; the same on every process, as all decide by the same numbers.

    Args:
        settings: how it moves; None leaves gradients as they are.
    """

    def __init__(self, settings: LossScale | None) -> None:
        self.settings = settings
        self.factor = settings.initial if settings else 1.0
        """What gradients are multiplied by in the next update; a power of two."""
        self.good = self.bad = 0
        self.skipped = 0
        """Updates skipped for an overflow, over all launches."""

    @property
    def state(self) -> Tensor:
        """All of it as (4,) float64 on the CPU, in which each number is exact."""
        numbers = (self.factor if self.settings else 0.0, self.good, self.bad, self.skipped)
        return torch.tensor(numbers, dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Take over what `state` gave; of a run without a scale, its counts alone."""
        factor, good, bad, skipped = state.tolist()
        self.good, self.bad, self.skipped = int(good), int(bad), int(skipped)
        if self.settings is not None and factor:
            self.factor = factor

    def may_overflow(self, loss: float) -> bool:
        """Return whether a smaller scale may make finite a gradient that is not."""
        return self.settings is not None and self.factor > LEAST and math.isfinite(loss)

    def unscale(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Divide gradients by the scale, in place."""
        if self.factor != 1.0:
            foreach_mul_(list(gradients.values()), 1.0 / self.factor)
        return gradients

    def adjust(self, *, overflow: bool) -> None:
        """Move the scale after an update that was performed, or skipped for an overflow."""
        if self.settings is None:
            return
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.skipped += 1
            self.bad += 1
            if self.bad >= self.settings.hysteresis:
                self.factor, self.bad = max(LEAST, self.factor / 2), 0
        elif self.good >= self.settings.growth_interval:
            self.factor, self.good, self.bad = self.factor * 2, 0, 0


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return the same value, whose gradient is multiplied by `factor`."""
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
