"""Learned task weights: one log-variance per task, trained with the model.

Kendall, Gal and Cipolla, 2018, equation 10, with s = log σ²: each task's loss is weighted by
exp(-s), and s / 2 is added as a regularizer. The s are not model parameters. Their gradient is
share_k · (1/2 - exp(-s_k) · L_k), which needs only the mean loss L_k of the task and its share of
the batch, so it works with any engine. At equilibrium exp(s_k) = 2 · L_k.
"""

import math
from collections.abc import Sequence

from attrs import define, field

MAX_LOG_VARIANCE = 10.0
"""Bound of |s|, so that weights are at most e¹⁰ and at least e⁻¹⁰."""


@define(kw_only=True)
class Uncertainty:
    """Learned log-variances of the tasks."""

    log_variances: list[float]
    rate: float = field(default=0.05)
    """Learning rate."""

    def weights(self) -> list[float]:
        """Return the weight of each task's loss."""
        return [math.exp(-log_variance) for log_variance in self.log_variances]

    def observe(self, losses: Sequence[float | None], shares: Sequence[float]) -> None:
        """Take one gradient descent step.

        Args:
            losses: mean loss of each task; None for tasks without samples in the batch.
            shares: share of each task in the batch's weight.
        """
        for task, (loss, share) in enumerate(zip(losses, shares, strict=True)):
            if loss is not None and math.isfinite(loss):
                current = self.log_variances[task]
                # dL/ds = share · (1/2 - exp(-s) · loss); see the module docstring.
                updated = current - self.rate * share * (0.5 - math.exp(-current) * loss)
                self.log_variances[task] = min(max(updated, -MAX_LOG_VARIANCE), MAX_LOG_VARIANCE)
