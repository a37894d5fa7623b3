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
    """Return `cross_entropy` of ``hidden @ weight.T`` without ever holding all logits.

    The gradients of a reduced loss are made in the forward pass, so they are held instead of
    logits: float32, the sizes of hidden and weight. It cannot be differentiated twice.

    Args:
        hidden: (..., H).
        weight: (V, H), dtype of hidden.
        targets: (...) int64 or int32, classes from 0 to V - 1, or `ignore_index`.
        ignore_index: the target of a row that does not count.
        label_smoothing: as for `cross_entropy`.
        z_loss: as for `cross_entropy`.
        reduction: as for `cross_entropy`. With ``"none"`` and logits above 64 MiB an accelerator
            makes them twice: a third more work. The CPU makes again only those rows whose
            gradients differ from what most rows get.

    Returns:
        () or, with ``"none"``, (...); float32 (float64 for float64).

    Rows of DTensors stay where they are; a weight that is split is gathered. A reduced loss is on
    every process.
    """
    tensors, options = (hidden, weight, targets), (ignore_index, label_smoothing, z_loss, reduction)
    if is_split(tensors):
        return _loss_of_parts(tensors, options)
    return perform(CONTRACT, tensors, options)


def _loss_of_parts(tensors: tuple[Tensor, Tensor, Tensor], options: tuple[Any, ...]) -> Tensor:
    """Return the loss of DTensors: computed on local rows, then summed over processes."""
    CONTRACT.bind(describe_call(CONTRACT, tensors, options))
    *other_options, reduction = options
    ignore_index = options[0]

    def own(*parts: Tensor) -> Any:
        return perform(CONTRACT, parts, (*other_options, "none" if reduction == "none" else "sum"))

    if reduction == "none":
        losses: Tensor = rows_mapped(CONTRACT, tensors, own)
        return losses
    counted = partial(_count, ignore_index=ignore_index) if reduction == "mean" else None
    return rows_reduced(CONTRACT, tensors, own, mean_over=counted)


def _count(targets: Tensor, *, ignore_index: int) -> Tensor:
    return (targets != ignore_index).sum()
