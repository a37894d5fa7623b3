"""The Engine protocol, through which trainers run, update and save a model.

`ms_align.engines.local.LocalEngine` runs any nn.Module in one process; `ms_parallel.Engine` runs
its models under any layout. Shapes: B rows, S positions, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ms_align.losses.protocol import Batch, Loss, Output


class StepReport(Protocol):
    """Result of one optimizer step, the same on every process."""

    @property
    def loss(self) -> float:
        """Mean loss of the global batch; NaN if the batch has no targets."""

    @property
    def grad_norm(self) -> float:
        """L2 norm of the gradient before clipping; NaN if the batch has no targets."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of this step."""

    @property
    def tokens(self) -> int:
        """Number of tokens in the global batch."""

    @property
    def skipped(self) -> Literal["no_targets", "nonfinite", "overflow", "refused"] | None:
        """Reason why the weights are unchanged; None if they were updated.

        The batch has no targets, the gradient is not finite or overflowed float16, or a policy
        rejected the update.
        """

    @property
    def statistics(self) -> Mapping[str, float]:
        """Statistics of the loss by name, each divided by the global weight."""


class Adapters(Protocol):
    """Adapters that are trained while the model's own weights are frozen."""

    def disable_adapter(self) -> AbstractContextManager[Any]:
        """Disable the adapters inside the `with` block."""

    def save_pretrained(self, folder: Path, /) -> None:
        """Write the two adapter files of peft. Collective."""


@runtime_checkable
class Engine(Protocol):
    """A model with its optimizer, on one or several processes."""

    @property
    def data_rank(self) -> int:
        """This process's data-parallel rank."""

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks."""

    @property
    def row_parts(self) -> int:
        """Number of parts that rows are split into; must divide the positions of a batch."""

    @property
    def vocabulary_size(self) -> int | None:
        """Vocabulary size of the model; None if unknown."""

    @property
    def context(self) -> int | None:
        """Maximum row length; None if unknown."""

    @property
    def module(self) -> nn.Module | None:
        """The complete model, if this process holds it unsharded; else None."""

    @property
    def adapters(self) -> Adapters | None:
        """The trained adapters; None in full fine-tuning."""

    def step(self, batch: Mapping[str, Any], loss: Loss, /) -> StepReport:
        """Run one optimizer step; `batch` has this data rank's rows of the global batch."""

    def evaluate(
        self, batch: Mapping[str, Any], function: Callable[[Output, Batch], Tensor], /
    ) -> Tensor:
        """Concatenate `function(output, batch)` over microbatches, (B, ...), without gradient.

        The function runs on all processes of a data rank, and all get the result.
        """

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = ...,
        top_k: int | None = ...,
        top_p: float = ...,
        min_p: float = ...,
        seed: int = ...,
        stop_token: Sequence[int] | None = ...,
    ) -> list[list[int]]:
        """Generate new tokens for this data rank's prompts; a stop token is included."""

    def gather(self, rows: Tensor, /) -> Tensor:
        """Concatenate the rows of all data ranks in rank order; shapes must be equal."""

    def save(self, folder: Path, /, *, dtype: torch.dtype | None = ...) -> None:
        """Write the complete model in a standard format, with adapters merged. Collective.

        `dtype` is the dtype of the saved parameters. None: their own.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights, optimizer state and counters by name; tensors are not copied."""

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> None:
        """Restore the result of `state_dict`."""
