"""Reductions that are bitwise the same however the batch is distributed over processes.

Each row is its own microbatch, so no matrix product changes shape with the layout; gradients,
losses and norms are added over rows by one fixed tree, and weights are updated elementwise.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.utils.deterministic
from torch import Tensor, nn

from ms_parallel.engine.gradients import add_tied
from ms_parallel.engine.loss import Loss, LossWithStatistics
from ms_parallel.engine.microbatches import measure
from ms_parallel.engine.report import MicrobatchResult, StepCounts
from ms_parallel.engine.reproducible.gradients import RowGradients
from ms_parallel.engine.reproducible.norm import FixedNorm
from ms_parallel.engine.reproducible.rows import BatchRows
from ms_parallel.engine.reproducible.tree import fold
from ms_parallel.engine.row_check import TERMS, fingerprint
from ms_parallel.engine.trainable import Trainable
from ms_parallel.host_copy import send
from ms_parallel.models.batch import Batch
from ms_parallel.pipeline.runtime import OnGradients


class OrderedReduction:
    """`Reduction` that collects gradients and losses per row and sums them in a fixed order.

    Args:
        stages: this process's stages by number.
        trained: their trainable parameters.
        copy: see `RowGradients`.
    """

    microbatch_size: int | None = 1

    def __init__(
        self, stages: Mapping[int, nn.Module], trained: Trainable, copy: tuple[str, str] | None
    ) -> None:
        self.trained, self.groups = trained, trained.groups
        self.row_gradients = RowGradients(stages, trained.parameters, trained.groups, copy)
        self.take: OnGradients | None = self.row_gradients.take
        self.head_weight = self.row_gradients.head
        self.norm = FixedNorm(trained.parameters, trained.counted)
        self.rows = BatchRows(groups=trained.groups, counts=(0,))

    def count(self, microbatches: Sequence[Batch], loss: Loss | LossWithStatistics) -> StepCounts:
        """Count the global batch, gather its checksums, and prepare for this many rows."""
        counts = measure(microbatches, loss)
        local = fingerprint(microbatches, float(counts[:, 0].sum()))
        self.rows, by_data_rank = BatchRows.exchange(len(microbatches), self.groups, local)
        self.row_gradients.begin(self.rows)
        weight, tokens = self.rows.sum(counts).tolist()
        return StepCounts(
            weight=weight, tokens=round(tokens), local=local, by_data_rank=by_data_rank
        )

    def sum_over_rows(self, values: Tensor) -> Tensor:
        """Sum (rows here, n) float64 CPU values over the global batch, to (n,)."""
        return self.rows.sum(values)

    @contextmanager
    def numerics(self) -> Iterator[None]:
        """Select torch's deterministic algorithms; torch raises for operators without one."""
        enabled = torch.are_deterministic_algorithms_enabled()
        warned = torch.is_deterministic_algorithms_warn_only_enabled()
        filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
        # Otherwise this mode fills every new tensor with NaN, which costs bandwidth.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warned)
            torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]

    def gradients(self) -> dict[str, Tensor]:
        """Return this process's part of each gradient of the global batch, by parameter name."""
        gradients = self.row_gradients.total()
        add_tied(gradients, self.trained.plan.tied, self.trained.placement, self.groups)
        return gradients

    def totals(
        self,
        results: Sequence[MicrobatchResult],
        metrics: int,
        mtp: int,
        gradients: dict[str, Tensor],
        row_terms: Tensor,
    ) -> Tensor:
        """Sum results and squared gradients over all rows in the order of the tree."""
        squares = self.norm.squares(gradients, self.groups.device)
        values = [result.values for result in results] if self.groups.place.is_loss_rank else []
        placed = self.rows.placed(values, 1 + metrics + mtp, squares)
        terms = send(row_terms.to(squares.dtype), squares.device)
        # Each number is nonzero on one process (row terms are small integers), so the all-reduce
        # is exact in any order; only `fold` rounds.
        self.groups.all_reduce(joined := torch.cat((squares, placed.flatten(), terms)))
        squared_norm = fold(joined[: self.norm.length])
        # (rows, n) -> (n, rows), folded to (n,).
        sums = fold(joined[self.norm.length : -TERMS].view_as(placed).t().contiguous())
        return torch.cat((squared_norm[None], sums, joined[-TERMS:]))
