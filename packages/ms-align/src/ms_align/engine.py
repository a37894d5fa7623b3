"""What trainers ask of whatever runs a model: the Protocols, and the values that cross them.

`ms_align.local.LocalEngine` runs any nn.Module in one process; `ms_parallel.Engine` fits too and
runs its models under any layout. Shapes: B rows, S positions, V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

__all__ = ["IGNORED", "Batch", "Engine", "Loss", "Output", "Update"]

Batch = Mapping[str, Tensor]
"""`tokens` (B, S) int64; by choice `targets` (already shifted, -100 where nothing is asked),
`weights`, `positions`, `documents`, and whatever a loss reads, each with B rows."""

IGNORED = -100
"""A target that counts nothing."""


class Output(Protocol):
    """What a loss may ask of a model's last stage; the same under every layout."""

    def logits(self, positions: slice = ...) -> Tensor:
        """Logits (B, S, V) of the whole vocabulary, in the model's dtype; of some positions."""

    def token_losses(self, targets: Tensor, *, temperature: float = ...) -> Tensor:
        """-log p(target), float32 (B, S), 0 where the target is -100.

        p is softmax(logits / temperature). The negative is what RL calls a log-probability.
        """

    def entropies(self, counted: Tensor, *, temperature: float = ...) -> Tensor:
        """Entropy of p in nats, float32 (B, S), where `counted` (B, S) is true; 0 elsewhere."""

    def head(self, name: str) -> Tensor:
        """What an extra head makes of the final hidden states, float32 (B, S, its width)."""


class Loss(Protocol):
    """A sum over a batch, what to divide it by, and figures to tell beside it.

    The engine sums over microbatches and ranks, and divides once by the weight of the global
    batch, so losses and gradients are the same however the batch is cut.
    """

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the figures that a call returns."""

    def weight(self, batch: Batch) -> float:
        """This batch's share of the divisor."""

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum, a float32 scalar; and each figure's sum, detached float32 (len(statistics),).

        Both are divided by the global weight, so a figure is a mean weighted like the loss.
        """


class Update(Protocol):
    """What one update did; the same on every process."""

    @property
    def loss(self) -> float:
        """Mean loss of the global batch."""

    @property
    def grad_norm(self) -> float:
        """Euclidean norm of the whole gradient, before it was clipped."""

    @property
    def learning_rate(self) -> float:
        """Rate of this update."""

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""

    @property
    def skipped(self) -> bool:
        """The gradient was not finite, or nothing had a loss: weights are as before."""

    @property
    def statistics(self) -> Mapping[str, float]:
        """The loss's figures, by name, each divided by the global weight."""


class Engine(Protocol):
    """A model, its optimizer, and the processes that share them."""

    @property
    def data_rank(self) -> int:
        """Which of the groups of processes that read different rows this one is in."""

    @property
    def data_ranks(self) -> int:
        """How many such groups there are."""

    def update(self, batch: Mapping[str, Any], loss: Loss, /) -> Update:
        """One step of the optimizer on the global batch, of which `batch` is this rank's rows."""

    def evaluate(
        self, batch: Mapping[str, Any], function: Callable[[Output, Batch], Tensor], /
    ) -> Tensor:
        """`function(output, batch)` of each microbatch, (b, ...), put together, without gradient.

        It is called on every process of a data rank alike, and all of them get the result.
        """

    def gather(self, rows: Tensor, /) -> Tensor:
        """The rows of all data ranks, in their order; each gives as many."""

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, moments and counters by name; tensors share the engine's storage."""

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> None:
        """Take over what `state_dict` gave."""
