"""The Protocols of losses and their inputs, and the loss of next-token prediction."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from ms_parallel.models.batch import IGNORED, Batch


class Output(Protocol):
    """What a loss may ask of the last stage; the same under every layout."""

    def logits(self, positions: slice = ...) -> Tensor:
        """Compute some positions' logits (B, S, V) of all tokens, in the model's dtype."""

    def token_losses(
        self, targets: Tensor, *, temperature: float = ..., z_loss: float = ...
    ) -> Tensor:
        """Compute -log p(target), float32 (B, S), 0 where the target is -100.

        p is softmax(logits / temperature). At temperature 1 no big logits are held. With `z_loss`
        that times the square of the logits' logsumexp is added.
        """

    def loss_sum(
        self, targets: Tensor, *, weights: Tensor | None = ..., z_loss: float = ...
    ) -> Tensor:
        """Compute the sum of `token_losses`, each times its weight (B, S); a scalar.

        Cheaper than adding up `token_losses`: gradients are computed with the loss.
        """

    def entropies(self, counted: Tensor, *, temperature: float = ...) -> Tensor:
        """Compute p's entropy in nats, float32 (B, S), where `counted` (B, S) is true; else 0."""

    def head(self, name: str) -> Tensor:
        """Return what an extra head makes of the final hidden states, float32 (B, S, its width)."""


class Loss(Protocol):
    """A sum over a batch, and what the sum over the whole global batch is divided by."""

    def weight(self, batch: Batch) -> float:
        """Return the batch's share of the divisor; shares add up over ranks and microbatches."""

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        """Sum over this microbatch, a float32 scalar that is not divided yet."""


@runtime_checkable
class LossWithStatistics(Protocol):
    """A loss that gives other numbers to log beside itself."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """Their names."""

    def weight(self, batch: Batch) -> float:
        """Return the batch's share of the divisor, as for any loss."""

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the loss, and of each statistic, detached float32 (len(statistics),).

        Both are divided by the global weight, so a statistic is a mean weighted like the loss.
        """


class NextTokenLoss:
    """Mean of -log p(target) over all target tokens of the global batch, by `weights` if given.

    Args:
        mtp_weight: of the mean loss of the model's layers that predict further, where it has any;
            0 leaves them as they are.
        z_coefficient: of the square of each target's logsumexp over the vocabulary, which keeps
            logits from drifting (Chowdhery et al., 2022: 1e-4); it counts in the loss.
    """

    mtp_weight: float = 0.3
    z_coefficient: float = 0.0  # also of a subclass whose own constructor knows of neither

    def __init__(self, mtp_weight: float = 0.3, z_coefficient: float = 0.0) -> None:
        self.mtp_weight = mtp_weight
        self.z_coefficient = z_coefficient

    def weight(self, batch: Batch) -> float:
        """Number of targets that are not -100, or the sum of their weights."""
        counted = batch["targets"] != IGNORED
        weights = batch.get("weights")
        return float(counted.sum() if weights is None else (weights * counted).sum())

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        """Add up the microbatch's token losses, weighted."""
        more = {"z_loss": self.z_coefficient} if self.z_coefficient else {}
        return output.loss_sum(batch["targets"], weights=batch.get("weights"), **more)
