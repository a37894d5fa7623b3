"""Decision on the device whether to update, and how to clip.

The host reads the loss and the gradient norm only after the optimizer is queued, so it can prepare
the next step while the device updates the weights.
"""

from math import inf

import torch
from attrs import frozen
from torch import Tensor

CLIP_EPSILON = 1e-6
"""Term added to the norm in the clip factor, as in `torch.nn.utils.clip_grad_norm_`."""


@frozen(kw_only=True)
class StepLimits:
    """Largest loss and gradient norm of a step; larger ones are skipped as `refused`."""

    loss: float = inf
    grad_norm: float = inf

    def allow(self, loss: float, grad_norm: float) -> bool:
        """Whether to take a step with this (finite) loss and gradient norm."""
        return loss <= self.loss and grad_norm <= self.grad_norm


@frozen(kw_only=True, eq=False)
class UpdateDecision:
    """Whether to update and how to clip, for torch's fused optimizers; float32 scalars."""

    found_inf: Tensor
    """1 to leave weights and optimizer state unchanged, else 0."""
    grad_scale: Tensor | None
    """Divisor of the gradients, at least 1; None without clipping."""

    @classmethod
    def of(
        cls,
        totals: Tensor,
        row_terms: Tensor,
        limits: StepLimits,
        max_grad_norm: float | None,
    ) -> "UpdateDecision":
        """Decide from the totals of a step, like the host in `Engine.step`.

        Args:
            totals: squared norm of the gradients, then the loss, of the global batch; other
                elements are ignored.
            row_terms: sums of the row check (T,), all 0 unless rows look wrong.
            limits: limits of the step.
            max_grad_norm: norm that gradients are clipped to; None for no clipping.
        """
        # In float64, like Python's numbers on the host, so that both decide the same.
        squared_norm, loss = totals[:2].double().unbind()
        norm = squared_norm.sqrt()
        finite = norm.isfinite() & loss.isfinite()
        # Separate from `finite`: the host reports limits as `refused`, and the default is infinite.
        allowed = (loss <= limits.loss) & (norm <= limits.grad_norm)
        take = finite & allowed & (row_terms == 0).all()
        divisor = None
        if max_grad_norm is not None:
            # The fused kernels divide gradients by `grad_scale`, so this is 1 / (clip factor).
            clipped = (norm + CLIP_EPSILON) / max_grad_norm
            divisor = torch.where(norm > max_grad_norm, clipped, 1.0).float()
        return cls(found_inf=(~take).float(), grad_scale=divisor)
