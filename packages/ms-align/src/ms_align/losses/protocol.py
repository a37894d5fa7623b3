"""What a loss is, and what it may ask of a model. Shapes: B rows, S positions, V vocabulary."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

Batch = Mapping[str, Tensor]
"""`tokens` (B, S) int64; by choice `targets` (already shifted, -100 where nothing is asked),
`weights`, `positions`, `documents`, and whatever a loss reads, each with B rows."""

IGNORED = -100
"""A target that counts nothing."""


class Output(Protocol):
    """What a loss may ask of a model's last stage; the same under every layout."""

    def logits(self, positions: slice = ...) -> Tensor:
        """Compute logits (B, S, V), V whole, in the model's dtype, of all positions or some."""

    def token_losses(self, targets: Tensor, *, temperature: float = ...) -> Tensor:
        """Compute -log p(target), float32 (B, S), 0 where the target is -100.

        p is softmax(logits / temperature). The negative is what RL calls a log-probability.
        """

    def entropies(self, counted: Tensor, *, temperature: float = ...) -> Tensor:
        """Compute entropies of p in nats, float32 (B, S), where `counted` (B, S); 0 elsewhere."""

    def head(self, name: str) -> Tensor:
        """Apply an extra head to the final hidden states, float32 (B, S, its width)."""


class Loss(Protocol):
    """A sum over a batch, what to divide it by, and statistics to log beside it.

    The engine sums over microbatches and ranks, and divides once by the weight of the global
    batch, so losses and gradients are the same however the batch is cut.
    """

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics that a call returns."""

    def weight(self, batch: Batch) -> float:
        """Compute this batch's share of the divisor."""

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum the loss, a float32 scalar, and the statistics, detached float32 (len(statistics),).

        Both are divided by the global weight, so a statistic is a mean weighted like the loss.
        """
