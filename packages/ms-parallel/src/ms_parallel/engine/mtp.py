"""Multi-token-prediction (MTP) loss (DeepSeek-V3, section 2.2).

At depth k, position i predicts token i+k+1 from tokens up to i+k of the same document. Each depth's
loss is the mean over its own targets; their mean over depths, times a weight, is added to the loss.
A depth without targets, as with short documents, adds nothing.
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
class MTPLoss(Protocol):
    """A loss that also trains MTP layers."""

    @property
    def mtp_weight(self) -> float:
        """Weight of the mean over depths; 0 does not train the layers."""


def mtp_depths(config: Any, loss: object) -> int:
    """Number of MTP layers to train; 0 unless the loss has a weight for them."""
    trains_mtp = isinstance(loss, MTPLoss) and loss.mtp_weight > 0
    return getattr(config, "mtp_layers", 0) if trains_mtp else 0


def mtp_targets(batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
    """Return the targets (B, S) of a depth, padded with -100, and their weights (B, S).

    Args:
        batch: batch with next-token targets.
        depth: MTP depth, from 1.
    """
    targets, documents = batch["targets"], batch.get("documents")
    weights = batch.get("weights")
    length = targets.shape[1]
    num_valid = max(0, length - depth)
    # Targets are next tokens, so the target at depth k is k positions to the right.
    shifted = torch.full_like(targets, IGNORED)
    shifted[:, :num_valid] = targets[:, depth:]
    if documents is not None:
        # Drop targets with a document boundary anywhere between position i and i + depth.
        for step in range(depth if num_valid else 0):
            crossing = (
                documents[:, step : step + num_valid]
                != documents[:, step + 1 : step + 1 + num_valid]
            )
            shifted[:, :num_valid].masked_fill_(crossing, IGNORED)
    counted = shifted != IGNORED
    if weights is None:
        return shifted, counted.float()
    shifted_weights = torch.zeros_like(weights)
    shifted_weights[:, :num_valid] = weights[:, depth:]
    return shifted, shifted_weights * counted


def mtp_divisors(
    microbatches: Sequence[Batch], depths: int, sum_over_rows: SumOverRows
) -> list[float]:
    """Total target weight of each depth over the global batch; every process calls it."""
    if not depths:
        return []
    local = torch.zeros(len(microbatches), depths, dtype=torch.float64)
    for row, microbatch in zip(local, microbatches, strict=True):
        for depth in range(depths):
            row[depth] = mtp_targets(microbatch, depth + 1)[1].sum().double()
    return sum_over_rows(local).tolist()


def mtp_losses_of(
    stage: StagedModel,
    hidden: Tensor,
    batch: Batch,
    divisors: Sequence[float],
    output: Callable[[Tensor], Output],
    row_split: RowSplit | None = None,
) -> Tensor:
    """Compute a microbatch's contribution (depths,) to the mean loss of each MTP layer.

    Args:
        stage: last stage.
        hidden: final hidden states of the stage.
        batch: the microbatch.
        divisors: as returned by `mtp_divisors`.
        output: builds an `Output` from final hidden states.
        row_split: split of the rows over processes, if any.
    """
    depth_states = stage.mtp_states(
        hidden,
        batch["tokens"],
        positions=batch["positions"],
        documents=batch.get("documents"),
        row_split=row_split,
    )
    losses = []
    for depth, (states, divisor) in enumerate(zip(depth_states, divisors, strict=True), 1):
        targets, weights = mtp_targets(batch, depth)
        total = output(states).loss_sum(targets, weights=weights)
        # Times 0 keeps the graph, so every rank runs the same collectives in its backward.
        losses.append(total / divisor if divisor else total * 0.0)
    return torch.stack(losses)
