"""Task weights that are learnt beside the model: one variance a task.

Kendall, Gal and Cipolla, 2018, equation 10, with s = log σ²: each task's loss counts exp(-s), and
s / 2 is added so that no task is given up. The s are no weights of the model: the gradient of the
whole loss with respect to s_k is share_k · (1/2 - exp(-s_k) · L_k), which follows from the task's
mean loss L_k and its share of the batch, so any engine will do. At rest exp(s_k) = 2 · L_k.
"""

import math
from collections.abc import Sequence

from attrs import define, field

FARTHEST = 10.0
"""|s| stays below: no weight is beyond a factor of e¹⁰."""


@define(kw_only=True)
class Uncertainty:
    """The log-variances of some tasks, moved by gradient descent."""

    log_variances: list[float]
    rate: float = field(default=0.05)
    """Step size."""

    def weights(self) -> list[float]:
        """Compute the factor of each task's loss."""
        return [math.exp(-one) for one in self.log_variances]

    def observe(self, losses: Sequence[float | None], shares: Sequence[float]) -> None:
        """Take one step down the gradient.

        Args:
            losses: mean loss of each task, None where it did not come.
            shares: of each task in the batch's weight.
        """
        for task, (loss, share) in enumerate(zip(losses, shares, strict=True)):
            if loss is not None and math.isfinite(loss):
                now = self.log_variances[task]
                moved = now - self.rate * share * (0.5 - math.exp(-now) * loss)
                self.log_variances[task] = min(max(moved, -FARTHEST), FARTHEST)
