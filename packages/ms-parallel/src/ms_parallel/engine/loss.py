"""Protocols of losses and their inputs, and the next-token loss."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from ms_parallel.models.batch import IGNORED, Batch


class Output(Protocol):
    """Last-stage outputs available to a loss; the same under every layout."""

    def logits(self, positions: slice = ...) -> Tensor:
        """Compute logits (B, S, V) of the given positions, by default all, in the model's dtype."""

    def token_losses(
        self, targets: Tensor, *, temperature: float = ..., z_loss: float = ...
    ) -> Tensor:
        """Compute -log p(target), float32 (B, S), 0 where the target is -100.

        p is softmax(logits / temperature). At temperature 1 large logits are not materialized. If
        `z_loss` is set, `z_loss` times the squared logsumexp of the logits is added.
        """

    def loss_sum(
        self, targets: Tensor, *, weights: Tensor | None = ..., z_loss: float = ...
    ) -> Tensor:
        """Compute the sum of `token_losses`, weighted by `weights` (B, S); a scalar.

        Cheaper than summing `token_losses`: gradients are computed together with the loss.
        """

    def entropies(self, counted: Tensor, *, temperature: float = ...) -> Tensor:
        """Compute the entropy of p in nats, float32 (B, S); 0 where `counted` (B, S) is false."""

    def head(self, name: str) -> Tensor:
        """Return an extra head's output for the final hidden states, float32 (B, S, width)."""


class Loss(Protocol):
    """Loss as a sum over a batch, with its divisor over the global batch."""

    def weight(self, batch: Batch) -> float:
        """Return the batch's part of the divisor, which is summed over ranks and microbatches."""

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        """Return the sum over this microbatch, a float32 scalar that is not divided yet."""


@runtime_checkable
class LossWithStatistics(Protocol):
    """Loss that also returns values to log."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the values to log."""

    def weight(self, batch: Batch) -> float:
        """Return the batch's part of the divisor, as in `Loss`."""

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss sum and the sum of each statistic, detached float32 (len(statistics),).

        Both are divided by the global weight, so a statistic is a mean weighted like the loss.
        """


class NextTokenLoss:
    """Mean of -log p(target) over the targets of the global batch, weighted by `weights` if given.

    Args:
        mtp_weight: weight of the multi-token-prediction (MTP) loss if the model has MTP layers;
            0 does not train them.
        z_loss_coefficient: weight of the squared logsumexp of each target's logits, which keeps
            logits from drifting (Chowdhery et al., 2022: 1e-4); included in the reported loss.
    """

    mtp_weight: float = 0.3
    z_loss_coefficient: float = 0.0  # default for subclasses whose constructor sets neither

    def __init__(self, mtp_weight: float = 0.3, z_loss_coefficient: float = 0.0) -> None:
        self.mtp_weight = mtp_weight
        self.z_loss_coefficient = z_loss_coefficient

    def weight(self, batch: Batch) -> float:
        """Return the number of targets other than -100, or the sum of their weights."""
        counted = batch["targets"] != IGNORED
        weights = batch.get("weights")
        return float(counted.sum() if weights is None else (weights * counted).sum())

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        """Return the weighted sum of the microbatch's token losses."""
        options = {"z_loss": self.z_loss_coefficient} if self.z_loss_coefficient else {}
        return output.loss_sum(batch["targets"], weights=batch.get("weights"), **options)
