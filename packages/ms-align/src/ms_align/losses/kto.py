"""The loss of a batch of labeled responses; the formulas are in `losses/unpaired.py`.

Shapes: B rows, S positions.
"""

import torch
from attrs import frozen
from torch import Tensor

from ms_align.losses.protocol import IGNORED, Batch, Output
from ms_align.losses.unpaired import LOSSES, KTOOptions, LabeledRows


@frozen(kw_only=True, slots=False)
class KTOLoss(KTOOptions):
    """Mean loss of a batch of labeled responses.

    Reads `targets`, `label`, `reference_logprobs`, and optionally `baseline`, (B,), and `weights`.
    """

    statistics = ("desirable", "reward_chosen", "reward_rejected")
    """Fraction of desirable rows, and the sums of rewards β·log(π/π_ref) of desirable and of
    undesirable rows, divided by the number of all rows."""

    def weight(self, batch: Batch) -> float:
        """Sum the weights of all rows; the weights of labels are not part of the divisor."""
        return float(row_weights(batch).sum())

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted sum over rows and the sums of the statistics."""
        weights = row_weights(batch)
        rows = self.rows(row_logprobs(output, batch), batch)
        with torch.no_grad():
            desirable = (rows.signs > 0).float()
            rewards = self.beta * rows.log_ratios
            statistics = torch.stack((desirable, desirable * rewards, (1 - desirable) * rewards))
        return (self.losses(rows) * weights).sum(), (statistics * weights).sum(1)

    def rows(self, logprobs: Tensor, batch: Batch) -> LabeledRows:
        """Combine row sums (B,) with the columns of the batch."""
        labels = batch["label"].to(logprobs)
        baseline = batch.get("baseline")
        return LabeledRows(
            log_ratios=logprobs - batch["reference_logprobs"].to(logprobs),
            signs=2 * (labels > 0.5).to(logprobs) - 1,
            baseline=torch.zeros_like(logprobs) if baseline is None else baseline.to(logprobs),
        )

    def losses(self, rows: LabeledRows) -> Tensor:
        """Compute the loss of each row, (B,), with the weight of its label."""
        desirable = torch.full_like(rows.signs, self.desirable_weight)
        weights = desirable.where(rows.signs > 0, self.undesirable_weight)
        return weights * LOSSES[self.loss_type][0](rows, self)


def row_logprobs(output: Output, batch: Batch) -> Tensor:
    """Sum the target log-probabilities of each row, float32 (B,)."""
    return -output.token_losses(batch["targets"]).sum(1)


def row_weights(batch: Batch) -> Tensor:
    """Return the weight of each row, float32 (B,); 0 without targets."""
    weights = (batch["targets"] != IGNORED).float()
    if "weights" in batch:
        weights = weights * batch["weights"].float()
    return weights.amax(1)
