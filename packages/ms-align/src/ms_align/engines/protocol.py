"""What trainers ask of whatever runs a model: the Protocols, and the values that cross them.

`ms_align.engines.local.LocalEngine` runs any nn.Module in one process; `ms_parallel.Engine` fits
too and runs its models under any layout. Shapes: B rows, S positions, V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from ms_align.losses.protocol import Batch, Loss, Output

__all__ = ["Engine", "Update"]


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
