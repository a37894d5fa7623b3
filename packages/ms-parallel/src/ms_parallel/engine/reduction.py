"""Sums over microbatches and data ranks: counts, losses and gradients of the global batch."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from ms_parallel.engine.gradients import reduce_gradients
from ms_parallel.engine.loss import Loss, LossWithStatistics
from ms_parallel.engine.microbatches import gather_over_rows, measure, sum_over_rows
from ms_parallel.engine.report import MicrobatchResult, StepCounts
from ms_parallel.engine.row_check import TERMS, fingerprint
from ms_parallel.engine.trainable import Trainable
from ms_parallel.models.batch import Batch
from ms_parallel.pipeline.runtime import OnGradients


class Reduction(Protocol):
    """Sums a step's losses and gradients; chosen once when the engine is built."""

    microbatch_size: int | None
    """Rows per microbatch that this reduction requires; None for the engine's setting."""
    take: OnGradients | None
    """Collects the gradients of each microbatch. None: autograd and FSDP sum in `param.grad`."""

    def count(self, microbatches: Sequence[Batch], loss: Loss | LossWithStatistics) -> StepCounts:
        """Count the global batch and gather its checksums; every process calls it."""

    def sum_over_rows(self, values: Tensor) -> Tensor:
        """Sum (microbatches here, n) float64 CPU values over the global batch, to (n,)."""

    def numerics(self) -> AbstractContextManager[None]:
        """Context manager around forwards and backwards."""

    def head_weight(self, weight: Tensor) -> Tensor:
        """Return the tensor (V, H) through which the output head's gradient is collected."""

    def gradients(self) -> dict[str, Tensor]:
        """Return this process's shard of each gradient of the global batch, by parameter name."""

    def totals(
        self,
        results: Sequence[MicrobatchResult],
        metrics: int,
        mtp: int,
        gradients: dict[str, Tensor],
        row_terms: Tensor,
    ) -> Tensor:
        """Sum results and squared gradients over the global batch in one all-reduce.

        Args:
            results: results of the local microbatches; empty except on the last stage.
            metrics: number of the loss's statistics.
            mtp: number of multi-token-prediction losses.
            gradients: local part of each gradient, by parameter name.
            row_terms: `RowCheck.terms`, (TERMS,) on the CPU.

        Returns:
            [squared gradient norm, loss, metrics, MTP losses, row terms] on the device.
        """


class SummedReduction:
    """Gradients summed by autograd and FSDP, losses by one all-reduce.

    Args:
        trained: this process's parameters.
    """

    microbatch_size: int | None = None
    take: OnGradients | None = None

    def __init__(self, trained: Trainable) -> None:
        self.trained, self.groups = trained, trained.groups

    def count(self, microbatches: Sequence[Batch], loss: Loss | LossWithStatistics) -> StepCounts:
        """Count the global batch and gather its checksums; every process calls it."""
        local = measure(microbatches, loss).sum(0)
        rows = fingerprint(microbatches, float(local[0]))
        # Columns: loss weight, tokens, then `Fingerprint.numbers`.
        numbers = torch.cat((local, local.new_tensor(rows.numbers)))
        gathered = gather_over_rows(numbers, self.groups)
        weight, tokens, *_ = gathered.sum(0).tolist()
        return StepCounts(
            weight=weight,
            tokens=round(tokens),
            local=rows,
            by_data_rank=[(code, distinct) for code, distinct in gathered[:, 2:].long().tolist()],
        )

    def sum_over_rows(self, values: Tensor) -> Tensor:
        """Sum (microbatches here, n) float64 CPU values over the global batch, to (n,)."""
        return sum_over_rows(values.sum(0), self.groups)

    def numerics(self) -> AbstractContextManager[None]:
        """Keep torch's default algorithms."""
        return nullcontext()

    def head_weight(self, weight: Tensor) -> Tensor:
        """Return the weight itself; its gradient is accumulated by autograd."""
        return weight

    def gradients(self) -> dict[str, Tensor]:
        """Return this process's part of each gradient of the global batch, by parameter name."""
        trained = self.trained
        return reduce_gradients(
            trained.parameters,
            trained.replicated,
            trained.unsharded,
            trained.plan.tied,
            trained.placement,
            self.groups,
        )

    def totals(
        self,
        results: Sequence[MicrobatchResult],
        metrics: int,
        mtp: int,
        gradients: dict[str, Tensor],
        row_terms: Tensor,
    ) -> Tensor:
        """Sum results and squared gradients over all processes in one all-reduce."""
        local = torch.zeros(2 + metrics + mtp + TERMS, device=self.groups.device)
        local[0] = self.trained.squared_norm(gradients)
        if results and self.groups.place.is_loss_rank:  # one process per row adds its results
            local[1:-TERMS] = torch.stack([result.values for result in results]).sum(0)
        local[-TERMS:].copy_(row_terms, non_blocking=True)
        return self.groups.all_reduce(local)
