"""The Engine Protocol: everything that trainers ask of whatever runs a model.

`ms_align.engines.local.LocalEngine` runs any nn.Module in one process; `ms_parallel.Engine` fits
too and runs its models under any layout. Shapes: B rows, S positions, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ms_align.losses.protocol import Batch, Loss, Output


class StepReport(Protocol):
    """Result of one optimizer step; the same on every process."""

    @property
    def loss(self) -> float:
        """Mean loss of the global batch; NaN where nothing had a target."""

    @property
    def grad_norm(self) -> float:
        """Euclidean norm of the whole gradient, before it was clipped; NaN likewise."""

    @property
    def learning_rate(self) -> float:
        """Rate of this update."""

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""

    @property
    def skipped(self) -> Literal["no_targets", "nonfinite", "overflow", "refused"] | None:
        """Why weights are as before.

        Nothing had a target, the gradient was not finite or did not fit into float16, or a policy
        refused the update.
        """

    @property
    def statistics(self) -> Mapping[str, float]:
        """The loss's statistics, by name, each divided by the global weight."""


class Adapters(Protocol):
    """Adapters that an engine trains instead of its model's own weights."""

    def disable_adapter(self) -> AbstractContextManager[Any]:
        """Switch the adapters off while the block runs, so that the model is as it was before."""

    def save_pretrained(self, folder: Path, /) -> None:
        """Write peft's two files; every process calls it."""


@runtime_checkable
class Engine(Protocol):
    """A model, its optimizer, and the processes that share them."""

    @property
    def data_rank(self) -> int:
        """Which of the groups of processes that read different rows this one is in."""

    @property
    def data_ranks(self) -> int:
        """How many such groups there are."""

    @property
    def row_parts(self) -> int:
        """Parts that processes split a row into; the positions of a batch divide by it."""

    @property
    def vocabulary_size(self) -> int | None:
        """Tokens that the model knows; None where it does not say."""

    @property
    def context(self) -> int | None:
        """Longest row that it takes; None where it does not say."""

    @property
    def module(self) -> nn.Module | None:
        """The whole model, where this process holds it unsplit; else None."""

    @property
    def adapters(self) -> Adapters | None:
        """The adapters that are trained; None where the model's own weights are."""

    def step(self, batch: Mapping[str, Any], loss: Loss, /) -> StepReport:
        """Take one optimizer step on the global batch, of which `batch` is this rank's rows."""

    def evaluate(
        self, batch: Mapping[str, Any], function: Callable[[Output, Batch], Tensor], /
    ) -> Tensor:
        """Join `function(output, batch)` of each microbatch, (b, ...), without gradient.

        It is called on every process of a data rank alike, and all of them get the result.
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
        """Generate the new tokens of this data rank's prompts; a stop token is the last one."""

    def gather(self, rows: Tensor, /) -> Tensor:
        """Gather the rows of all data ranks, in their order; each gives as many."""

    def save(self, folder: Path, /, *, dtype: torch.dtype | None = ...) -> None:
        """Write the whole model as others read it, adapters merged; every process calls it.

        `dtype` is that of the parameters in the files, by default their own.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights, moments and counters by name; tensors share the engine's storage."""

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> None:
        """Take over what `state_dict` gave."""
