"""SFT loss: weighted mean over target tokens, with token, sample and task weights.

Shapes: B rows, S positions, K tasks.
"""

import torch
from attrs import frozen
from torch import Tensor

from ms_align.errors import ConfigError
from ms_align.losses.protocol import IGNORED, Batch, Output


def token_weights(batch: Batch, *, per_row: bool) -> Tensor:
    """Return the weight of each token's loss, float32 (B, S), 0 at ignored targets.

    Args:
        batch: reads `targets`, and optionally `weights` (B, S) and `row_weights` (B,).
        per_row: normalize weights to a sum of 1 per row, so that all rows count equally.
    """
    weights = (batch["targets"] != IGNORED).float()
    if "weights" in batch:
        weights = weights * batch["weights"].float()
    if per_row:
        # A row without targets keeps weight 0.
        weights = weights / weights.sum(1, keepdim=True).clamp_min(1e-30)
    if "row_weights" in batch:
        weights = weights * batch["row_weights"].float()[:, None]
    return weights


@frozen(kw_only=True)
class SFTLoss:
    """Weighted mean of -log p(target).

    Reads `targets`, and optionally `weights` (B, S), `row_weights` (B,) and `task` (B,). For each
    task k the statistics are `sum.k`, its loss before `task_weights`, and `weight.k`, its weight.
    """

    tasks: int = 0
    """Number of tasks in the column `task`; 0 ignores the column."""
    task_weights: tuple[float, ...] = ()
    """Weight of each task's loss, not included in the divisor. Empty: 1."""
    per_row: bool = False
    """Divide by the number of rows, which count equally, instead of by the tokens' weights.

    The divisor is then independent of the sampled rows, which keeps importance weights unbiased.
    """

    def __attrs_post_init__(self) -> None:
        if self.task_weights and len(self.task_weights) != self.tasks:
            raise ConfigError(
                f"task_weights must have one value for each of the {self.tasks} tasks, got "
                f"{len(self.task_weights)}; add or remove values"
            )

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the two statistics of each task."""
        return tuple(
            f"{statistic}.{task}" for statistic in ("sum", "weight") for task in range(self.tasks)
        )

    def weight(self, batch: Batch) -> float:
        """Return the number of rows, or the sum of the token weights."""
        if self.per_row:
            return float(batch["targets"].shape[0])
        return float(token_weights(batch, per_row=False).sum())

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the token losses and the sums of the statistics."""
        weights = token_weights(batch, per_row=self.per_row)
        row_losses = (output.token_losses(batch["targets"]) * weights).sum(1)
        if not self.tasks:
            return row_losses.sum(), row_losses.new_zeros(0)
        task = batch["task"]
        statistics = torch.stack((row_losses.detach(), weights.sum(1)))  # (2, B)
        sums = statistics.new_zeros(2, self.tasks).index_add_(1, task, statistics)  # (2, K)
        if self.task_weights:
            # After the statistics, which report losses before task weights.
            row_losses = row_losses * row_losses.new_tensor(self.task_weights)[task]
        return row_losses.sum(), sums.flatten()
