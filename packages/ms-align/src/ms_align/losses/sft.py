"""Instruction tuning: the mean loss of chosen tokens, weighted by token, sample and task.

Shapes: B rows, S positions, K tasks.
"""

import torch
from attrs import frozen
from torch import Tensor

from ms_align.errors import ConfigError
from ms_align.losses.protocol import IGNORED, Batch, Output


def token_weights(batch: Batch, *, per_row: bool) -> Tensor:
    """Compute how much each token's loss counts, float32 (B, S), 0 where there is no target.

    Args:
        batch: reads `targets`, by choice `weights` (B, S) and `row_weights` (B,).
        per_row: the weights of a row sum to 1, so that every row counts alike.
    """
    weights = (batch["targets"] != IGNORED).float()
    if "weights" in batch:
        weights = weights * batch["weights"].float()
    if per_row:
        weights = weights / weights.sum(1, keepdim=True).clamp_min(1e-30)
    if "row_weights" in batch:
        weights = weights * batch["row_weights"].float()[:, None]
    return weights


@frozen(kw_only=True)
class SFTLoss:
    """Weighted mean of -log p(target).

    Reads `targets`; by choice `weights` (B, S), `row_weights` (B,) and `task` (B,). Its
    statistics are `sum.k` and `weight.k` of each task k: its share of the loss before
    `task_weights`, and of the weight.
    """

    tasks: int = 0
    """How many tasks `task` counts; 0 reads none."""
    task_weights: tuple[float, ...] = ()
    """Factor of each task's loss, of which the divisor knows nothing; none for 1."""
    per_row: bool = False
    """Divide by the number of rows, each of which counts alike, instead of by the tokens' weight.

    The divisor then doesn't depend on what was drawn, which keeps importance weights unbiased.
    """

    def __attrs_post_init__(self) -> None:
        if self.task_weights and len(self.task_weights) != self.tasks:
            raise ConfigError(
                f"{len(self.task_weights)} task_weights for {self.tasks} tasks; give one for each"
            )

    @property
    def statistics(self) -> tuple[str, ...]:
        """Two statistics a task."""
        return tuple(f"{kind}.{task}" for kind in ("sum", "weight") for task in range(self.tasks))

    def weight(self, batch: Batch) -> float:
        """Count the rows, or sum the weights of all targets."""
        if self.per_row:
            return float(batch["targets"].shape[0])
        return float(token_weights(batch, per_row=False).sum())

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the weighted sum of the token losses, and the statistics' sums."""
        weights = token_weights(batch, per_row=self.per_row)
        row_losses = (output.token_losses(batch["targets"]) * weights).sum(1)
        if not self.tasks:
            return row_losses.sum(), row_losses.new_zeros(0)
        task = batch["task"]
        statistics = torch.stack((row_losses.detach(), weights.sum(1)))  # (2, B)
        sums = statistics.new_zeros(2, self.tasks).index_add_(1, task, statistics)
        if self.task_weights:
            row_losses = row_losses * row_losses.new_tensor(self.task_weights)[task]
        return row_losses.sum(), sums.flatten()
