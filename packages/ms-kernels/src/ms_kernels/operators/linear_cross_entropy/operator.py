"""The public function `linear_cross_entropy`."""

from functools import partial
from typing import Any, Literal

from torch import Tensor

from ms_kernels.core.dispatch import describe_call, perform
from ms_kernels.core.split_rows import is_split, rows_mapped, rows_reduced
from ms_kernels.operators.linear_cross_entropy.contract import CONTRACT


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Return `cross_entropy` of ``hidden @ weight.T`` without materializing all logits.

    For a reduced loss the forward pass also computes the gradients and saves them instead of the
    logits: float32, with the shapes of hidden and weight. Not twice differentiable.

    Args:
        hidden: (..., H).
        weight: (V, H), dtype of hidden.
        targets: (...) int64 or int32, classes from 0 to V - 1, or `ignore_index`.
        ignore_index: target of rows that are excluded from the loss.
        label_smoothing: as for `cross_entropy`.
        z_loss: as for `cross_entropy`.
        reduction: as for `cross_entropy`. With ``"none"`` and logits above 64 MiB an accelerator
            computes them twice, a third more work. The CPU recomputes only rows whose incoming
            gradient differs from the most common one.

    Returns:
        () or, with ``"none"``, (...); float32 (float64 for float64).

    Rows of DTensors stay sharded; a sharded weight is gathered. A reduced loss is replicated.
    """
    tensors, options = (hidden, weight, targets), (ignore_index, label_smoothing, z_loss, reduction)
    if is_split(tensors):
        return _sharded_loss(tensors, options)
    return perform(CONTRACT, tensors, options)


def _sharded_loss(tensors: tuple[Tensor, Tensor, Tensor], options: tuple[Any, ...]) -> Tensor:
    """Return the loss of DTensors: computed on local rows, then reduced over ranks."""
    CONTRACT.bind(describe_call(CONTRACT, tensors, options))
    *other_options, reduction = options
    ignore_index = options[0]

    def run_local(*shards: Tensor) -> Any:
        return perform(CONTRACT, shards, (*other_options, "none" if reduction == "none" else "sum"))

    if reduction == "none":
        losses: Tensor = rows_mapped(CONTRACT, tensors, run_local)
        return losses
    counted = partial(_count, ignore_index=ignore_index) if reduction == "mean" else None
    return rows_reduced(CONTRACT, tensors, run_local, mean_over=counted)


def _count(targets: Tensor, *, ignore_index: int) -> Tensor:
    return (targets != ignore_index).sum()
