"""What the last stage gives a loss, and the loss of next-token prediction."""

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from ms_parallel import operators
from ms_parallel.cluster.groups import Groups
from ms_parallel.models.batch import Batch
from ms_parallel.operators import Ops
from ms_parallel.operators.split_vocabulary import VocabularyParallelLoss
from ms_parallel.split.tensor_parallel import gather_sequence, gather_vocabulary, local_view

__all__ = ["Batch", "HeadOutput", "LogitsOutput", "Loss", "NextTokenLoss", "Output"]

IGNORED = -100
EVERYWHERE = slice(None)
WHOLE_LOGITS_BYTES = 256 * 2**20
"""Logits up to this size are held for the backward; beyond it, computed twice by chunks."""


class Output(Protocol):
    """What a loss may ask of the last stage; the same under every layout."""

    def logits(self, positions: slice = ...) -> Tensor:
        """Logits (B, S, V) of the whole vocabulary, in the model's dtype; of some positions."""

    def token_losses(self, targets: Tensor) -> Tensor:
        """-log p(target), float32 (B, S), 0 where the target is -100. Holds no big logits."""


class Loss(Protocol):
    """A sum over a batch, and what the sum over the whole global batch is divided by."""

    def weight(self, batch: Batch) -> float:
        """This batch's share of the divisor; shares are added up over ranks and microbatches."""

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        """Sum over this microbatch, a float32 scalar that is not divided yet."""


class NextTokenLoss:
    """Mean of -log p(target) over all target tokens of the global batch, by `weights` if given."""

    def weight(self, batch: Batch) -> float:
        """Number of targets that are not -100, or the sum of their weights."""
        counted = batch["targets"] != IGNORED
        weights = batch.get("weights")
        return float(counted.sum() if weights is None else (weights * counted).sum())

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        """Weighted sum of the microbatch's token losses."""
        losses = output.token_losses(batch["targets"])
        weights = batch.get("weights")
        return losses.sum() if weights is None else (losses * weights).sum()


class HeadOutput:
    """The last stage's normalised hidden state and head, from which logits or losses follow.

    Args:
        hidden: (B, S, H); under tensor parallelism this rank's part of the sequence, (B, S/t, H).
        weight: (V, H); under tensor parallelism a DTensor split over the vocabulary.
        ops: the model's operators.
        groups: the layout's processes.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, ops: Ops, groups: Groups) -> None:
        self.ops = ops
        self.groups = groups
        self.split = groups.layout.tensor > 1
        self.weight = local_view(weight)
        self.hidden = gather_sequence(hidden, groups) if self.split else hidden

    def logits(self, positions: slice = EVERYWHERE) -> Tensor:
        """Logits (B, S, V), gathered over the tensor axis; of some positions, or of all."""
        local = F.linear(self.hidden[:, positions], self.weight)
        if not self.split:
            return local
        return gather_vocabulary(local, self.groups)

    def token_losses(self, targets: Tensor) -> Tensor:
        """-log p(target), float32 (B, S), 0 where the target is -100."""
        if self.split:
            group = self.groups.group("tensor")
            flat = self.hidden.flatten(0, 1)
            losses: Tensor = VocabularyParallelLoss.apply(  # type: ignore[no-untyped-call]
                flat, self.weight, targets.flatten(), group, WHOLE_LOGITS_BYTES
            )
            return losses.view(targets.shape)
        return self.ops.linear_cross_entropy(self.hidden, self.weight, targets, reduction="none")


class LogitsOutput:
    """The logits of a model that has no head apart from it.

    Args:
        whole: logits (B, S, V), the same on every tensor rank.
    """

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole

    def logits(self, positions: slice = EVERYWHERE) -> Tensor:
        """Logits (B, S, V) of some positions, or of all."""
        return self.whole[:, positions]

    def token_losses(self, targets: Tensor) -> Tensor:
        """-log p(target), float32 (B, S), 0 where the target is -100."""
        return operators.cross_entropy(self.whole, targets, reduction="none")
