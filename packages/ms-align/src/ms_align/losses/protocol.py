"""Interface between losses and models. Shapes: B rows, S positions, V vocabulary."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

Batch = Mapping[str, Tensor]
"""`tokens` (B, S) int64; optionally `targets` (already shifted, -100 where ignored), `weights`,
`positions`, `documents`, and other columns that a loss reads, each with B rows."""

IGNORED = -100
"""Target value that is ignored in losses."""


class Output(Protocol):
    """Output of a model's last stage that a loss receives, under any layout."""

    def logits(self, positions: slice = ...) -> Tensor:
        """Return logits (B, S, V) in the model's dtype, of all positions or a slice."""

    def token_losses(self, targets: Tensor, *, temperature: float = ...) -> Tensor:
        """Compute -log p(target), float32 (B, S), 0 where the target is -100.

        p is softmax(logits / temperature). The negated result is the log-probability in RL terms.
        """

    def entropies(self, counted: Tensor, *, temperature: float = ...) -> Tensor:
        """Return entropies of p in nats, float32 (B, S), where `counted` (B, S); 0 elsewhere."""

    def head(self, name: str) -> Tensor:
        """Apply an extra head to the final hidden states, float32 (B, S, head width)."""


class Loss(Protocol):
    """Sum over a batch, with its divisor and statistics.

    The engine sums over microbatches and ranks and divides once by the weight of the global batch,
    so losses and gradients do not depend on how the batch is split.
    """

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics that a call returns."""

    def weight(self, batch: Batch) -> float:
        """Return this batch's contribution to the divisor."""

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss sum, a float32 scalar, and the statistics' sums, float32 (statistics,).

        Both are divided by the global weight, so a statistic is weighted like the loss. The
        statistics are detached.
        """
