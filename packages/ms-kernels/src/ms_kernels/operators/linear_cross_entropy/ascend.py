"""Linear cross-entropy and log-probabilities of tokens without materializing all logits.

Three operators of torch_npu, made for vocabulary-parallel layers, are used here on one device
that holds all classes: npu_fused_linear_online_max_sum multiplies and returns each row's maximum
and Σ exp, npu_fused_cross_entropy_loss_with_max_sum computes the losses from them, and a backward
operator recomputes the logits and computes the gradients with two products. They have no
Meta kernel and no registered gradient; `ms_kernels.core.torch_operator` adds both. CANN 9.0 is
required.

Differences from the contract, bridged here:

1. The class range ends at V. CANN's documentation describes the end as inclusive, but its kernel
   treats it as exclusive; no target is V, so V is right in both cases.
2. An ignored target is replaced by class 0, and its loss and gradient by 0. An out-of-range target
   is also replaced by class 0, and its loss is NaN.
3. Reductions are computed here, over the rows that are not ignored.
4. Every target is a local class, so the mask of non-local targets is all zeros; it is created again
   for the backward pass instead of being saved.

One difference remains: CANN's kernels round the logits to half precision, as a model with a
half-precision projection does; the contract's reference keeps float32.
"""

from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.ascend import HALVES, empty, on_npu, within_classes
from ms_kernels.contracts.call import Call
from ms_kernels.core.torch_operator import opaque
from ms_kernels.operators.cross_entropy.contract import LossOptions, mean_divisor, reduce
from ms_kernels.operators.linear_cross_entropy.contract import CONTRACT

MERIT = "npu_fused_linear_online_max_sum: product and softmax in one kernel, without logits"

MIN_CLASSES = 128
"""Minimum number of classes of the backward operator."""

MAX_FEATURES = 65_534


def _rows(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1]).contiguous()


def row_losses(hidden: Tensor, weight: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return -log p, the maximum logit and Σ exp(logit - maximum) of each row, float32."""
    # Classes [0, V): this device has all of them.
    row_max, exp_sum, target_logit, *_ = torch.ops.npu.npu_fused_linear_online_max_sum(
        _rows(hidden), weight.contiguous(), classes, 0, len(weight)
    )
    losses, _ = torch.ops.npu.npu_fused_cross_entropy_loss_with_max_sum(
        row_max, exp_sum, target_logit
    )
    return losses, row_max, exp_sum


def gradients(
    grad_losses: Tensor,
    hidden: Tensor,
    weight: Tensor,
    classes: Tensor,
    row_max: Tensor,
    exp_sum: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden and weight, given those of the row losses."""
    # One bit per row; all are 0, as every target is a local class.
    nonlocal_mask = classes.new_zeros((len(classes) + 7) // 8, dtype=torch.uint8)
    rows, flat = _rows(hidden), (tensor.reshape(-1) for tensor in (row_max, exp_sum))
    grad_hidden, grad_weight = (
        torch.ops.npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
            grad_losses.contiguous(), rows, weight.contiguous(), nonlocal_mask, classes, 0.0, *flat
        )
    )
    return grad_hidden.view(hidden.shape), grad_weight


def valid_classes(targets: Tensor, ignored: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Apply `within_classes` to the targets and flatten the resulting class indices."""
    classes, out_of_range = within_classes(targets, ignored, len(weight))
    return classes.reshape(-1), out_of_range


def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    settings = LossOptions(*options)
    ignored = targets == settings.ignore_index
    classes, out_of_range = valid_classes(targets, ignored, weight)
    losses, row_max, exp_sum = row_losses(hidden, weight, classes)
    losses = losses.view(targets.shape).masked_fill(out_of_range, torch.nan).masked_fill(ignored, 0)
    shaped = row_max.view(targets.shape), exp_sum.view(targets.shape)
    return reduce(losses, ignored, settings.reduction), *shaped


def _fake(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = hidden.new_empty(targets.shape, dtype=torch.float32)
    loss = (
        torch.empty_like(rows) if LossOptions(*options).reduction == "none" else rows.new_empty(())
    )
    return loss, rows, torch.empty_like(rows)


def _backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    row_max: Tensor,
    exp_sum: Tensor,
    grad_mask: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    settings = LossOptions(*options)
    ignored = targets == settings.ignore_index
    if settings.reduction == "mean":
        grad = grad / mean_divisor(ignored)
    grad_losses = grad.expand(targets.shape).masked_fill(ignored, 0).reshape(-1)
    return gradients(
        grad_losses, hidden, weight, valid_classes(targets, ignored, weight)[0], row_max, exp_sum
    )


def large_enough(call: Call) -> str | None:
    """Decline too few classes and too many features for the kernels."""
    classes, features = call.present[1].shape
    if classes < MIN_CLASSES:
        return f"needs at least {MIN_CLASSES} classes, not {classes}"
    if features > MAX_FEATURES:
        return f"supports up to {MAX_FEATURES} features, not {features}"
    return empty(call)


def _refuses(call: Call) -> str | None:
    """Decline label smoothing, z-loss and sizes that the fused loss does not support."""
    if not LossOptions(*call.options).plain:
        return "does not support label smoothing or a z-loss"
    return large_enough(call)


IMPLEMENTATION = on_npu(
    CONTRACT,
    opaque(
        CONTRACT,
        "ascend",
        forward=_forward,
        fake=_fake,
        intermediates={"row_max": "...", "exp_sum": "..."},
        backward=_backward,
        saves=("hidden", "weight", "targets", "row_max", "exp_sum"),
    ),
    MERIT,
    refuses=_refuses,
    dtypes=HALVES,
)
