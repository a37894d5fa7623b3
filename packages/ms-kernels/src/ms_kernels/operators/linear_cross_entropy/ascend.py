"""Linear cross-entropy and log-probabilities of tokens, without holding all logits.

Three operators of torch_npu, made for vocabularies that are split over devices, here on one device
that holds all classes: npu_fused_linear_online_max_sum multiplies and keeps each row's maximum and
Σ exp, npu_fused_cross_entropy_loss_with_max_sum makes losses of them, and one more makes the
gradients, logits again and two products. None has a Meta kernel or a gradient registered; both are
ours (`ms_kernels.core.torch_operator`). They need CANN 9.0.

Differences from the contract, bridged here:

1. The range of classes ends with V. CANN's documentation counts the end among them, but its kernel
   takes it for the first class beyond; no target is V, so V is right for both.
2. An ignored target is set to class 0; its loss and its slope are set to 0. So is one that is no
   class, whose loss is NaN.
3. Reductions are made here, over the rows that count.
4. Every target is a class of this device's, so the mask of those that are not is all zeros: it is
   made again for the backward pass, not kept.

One difference stays: CANN's kernels round the logits to half precision, as a plain model does that
projects in half precision, where the contract's reference keeps float32.
"""

from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.ascend import HALVES, empty, on_npu, within_classes
from ms_kernels.contracts.call import Call
from ms_kernels.core.torch_operator import opaque
from ms_kernels.operators.cross_entropy.contract import LossOptions, counted_of, reduce
from ms_kernels.operators.linear_cross_entropy.contract import CONTRACT

MERIT = "npu_fused_linear_online_max_sum: product and softmax in one kernel, without logits"

LEAST_CLASSES = 128
"""Classes that the gradient's operator needs at least."""

MOST_FEATURES = 65_534


def _rows(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1]).contiguous()


def row_losses(hidden: Tensor, weight: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return -log p, the greatest logit and Σ exp (logit - greatest) of each row, float32."""
    top, total, picked, *_ = torch.ops.npu.npu_fused_linear_online_max_sum(
        _rows(hidden), weight.contiguous(), chosen, 0, len(weight)
    )
    losses, _ = torch.ops.npu.npu_fused_cross_entropy_loss_with_max_sum(top, total, picked)
    return losses, top, total


def gradients(
    slopes: Tensor, hidden: Tensor, weight: Tensor, chosen: Tensor, top: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden and weight from those of the rows' losses."""
    nowhere = chosen.new_zeros((len(chosen) + 7) // 8, dtype=torch.uint8)
    rows, flat = _rows(hidden), (each.reshape(-1) for each in (top, total))
    to_hidden, to_weight = torch.ops.npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
        slopes.contiguous(), rows, weight.contiguous(), nowhere, chosen, 0.0, *flat
    )
    return to_hidden.view(hidden.shape), to_weight


def chosen_classes(targets: Tensor, ignored: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `within_classes` makes of the targets, the targets flattened."""
    chosen, foreign = within_classes(targets, ignored, len(weight))
    return chosen.reshape(-1), foreign


def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    settings = LossOptions(*options)
    ignored = targets == settings.ignore_index
    chosen, foreign = chosen_classes(targets, ignored, weight)
    losses, top, total = row_losses(hidden, weight, chosen)
    losses = losses.view(targets.shape).masked_fill(foreign, torch.nan).masked_fill(ignored, 0)
    shaped = top.view(targets.shape), total.view(targets.shape)
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
    top: Tensor,
    total: Tensor,
    grad_mask: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    settings = LossOptions(*options)
    ignored = targets == settings.ignore_index
    if settings.reduction == "mean":
        grad = grad / counted_of(ignored)
    slopes = grad.expand(targets.shape).masked_fill(ignored, 0).reshape(-1)
    return gradients(
        slopes, hidden, weight, chosen_classes(targets, ignored, weight)[0], top, total
    )


def large_enough(call: Call) -> str | None:
    """Decline fewer classes and more features than the kernels take."""
    classes, features = call.present[1].shape
    if classes < LEAST_CLASSES:
        return f"takes {LEAST_CLASSES} classes or more, not {classes}"
    if features > MOST_FEATURES:
        return f"takes up to {MOST_FEATURES} features, not {features}"
    return empty(call)


def _refuses(call: Call) -> str | None:
    """Decline what the fused loss does not offer."""
    if not LossOptions(*call.options).plain:
        return "has no label smoothing and no z-loss"
    return large_enough(call)


IMPLEMENTATION = on_npu(
    CONTRACT,
    opaque(
        CONTRACT,
        "ascend",
        forward=_forward,
        fake=_fake,
        intermediates={"top": "...", "total": "..."},
        backward=_backward,
        saves=("hidden", "weight", "targets", "top", "total"),
    ),
    MERIT,
    refuses=_refuses,
    dtypes=HALVES,
)
