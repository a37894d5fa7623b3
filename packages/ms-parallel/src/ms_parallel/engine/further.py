"""The loss of layers that predict tokens further ahead than the next one.

At depth k position i predicts token i+k+1 from tokens up to i+k, all of one document. The mean over
depths of each one's mean over its own targets, times a weight, is added to the loss: a depth
without targets, as in rows of short documents, adds nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ms_parallel.engine.loss import Output
from ms_parallel.engine.microbatches import SumOverRows
from ms_parallel.models.batch import IGNORED, Batch
from ms_parallel.models.staged import RowSplit, StagedModel


@runtime_checkable
class HasFurther(Protocol):
    """A loss that a model's prediction layers have too."""

    @property
    def mtp_weight(self) -> float:
        """Weight of the mean over depths; 0 leaves the layers out."""


def depths_of(config: Any, loss: object) -> int:
    """Count the layers of a model that predict further; 0 unless the loss asks for them."""
    asked = isinstance(loss, HasFurther) and loss.mtp_weight > 0
    return getattr(config, "prediction_layers", 0) if asked else 0


def further_targets(batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
    """Shift targets (B, S) to a depth, -100 where there is none, and their weights (B, S).

    Args:
        batch: its targets are those of the next token.
        depth: from 1 on.
    """
    targets, documents = batch["targets"], batch.get("documents")
    weights = batch.get("weights")
    length = targets.shape[1]
    kept = max(0, length - depth)
    shifted = torch.full_like(targets, IGNORED)
    shifted[:, :kept] = targets[:, depth:]
    if documents is not None:
        for step in range(depth if kept else 0):
            crossing = documents[:, step : step + kept] != documents[:, step + 1 : step + 1 + kept]
            shifted[:, :kept].masked_fill_(crossing, IGNORED)
    counted = shifted != IGNORED
    if weights is None:
        return shifted, counted.float()
    moved = torch.zeros_like(weights)
    moved[:, :kept] = weights[:, depth:]
    return shifted, moved * counted


def divisors(microbatches: Sequence[Batch], depths: int, sum_over_rows: SumOverRows) -> list[float]:
    """Sum the weight of each depth's targets in the global batch, of which these are a part."""
    if not depths:
        return []
    local = torch.zeros(len(microbatches), depths, dtype=torch.float64)
    for row, microbatch in zip(local, microbatches, strict=True):
        for depth in range(depths):
            row[depth] = further_targets(microbatch, depth + 1)[1].sum().double()
    return sum_over_rows(local).tolist()


def further_shares(
    stage: StagedModel,
    hidden: Tensor,
    batch: Batch,
    of_depths: Sequence[float],
    output: Callable[[Tensor], Output],
    row_split: RowSplit | None = None,
) -> Tensor:
    """Compute a microbatch's share (depths,) of the mean loss of each prediction layer.

    Args:
        stage: the last.
        hidden: its finished hidden states.
        batch: the microbatch.
        of_depths: as `divisors` gives them.
        output: makes of finished hidden states what token losses are asked of.
        row_split: where processes share out the rows.
    """
    made = stage.further(
        hidden,
        batch["tokens"],
        positions=batch["positions"],
        documents=batch.get("documents"),
        row_split=row_split,
    )
    shares = []
    for depth, (states, divisor) in enumerate(zip(made, of_depths, strict=True), 1):
        targets, weights = further_targets(batch, depth)
        total = (output(states).token_losses(targets) * weights).sum()
        shares.append(total / divisor if divisor else total * 0.0)
    return torch.stack(shares)
