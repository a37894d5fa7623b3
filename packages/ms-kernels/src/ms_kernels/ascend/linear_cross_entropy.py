"""Linear cross-entropy and log-probabilities of tokens, whose logits are never all there.

Three operators of torch_npu, made for vocabularies that are split over devices, here on one device
that holds all classes: npu_fused_linear_online_max_sum multiplies and keeps each row's maximum and
Σ exp, npu_fused_cross_entropy_loss_with_max_sum makes losses of them, and one more makes the
gradients, logits again and two products. None has a Meta kernel or a gradient registered; both are
ours (`ms_kernels.library`). They need CANN 9.0.

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

import torch
from torch import Tensor

from ms_kernels.ascend.limits import HALVES, NPU, classes_of, empty, given
from ms_kernels.contract import Call
from ms_kernels.library import opaque
from ms_kernels.reference import CONTRACTS
from ms_kernels.reference.cross_entropy import counted_of, reduce
from ms_kernels.registry import Implementation

__all__ = ["IMPLEMENTATIONS", "linear_cross_entropy", "token_log_probs"]

LEAST_CLASSES = 128
"""Of the gradient's operator."""

MOST_FEATURES = 65_534


def _rows(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1]).contiguous()


def _losses(hidden: Tensor, weight: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return -log p, the greatest logit and Σ exp (logit - greatest) of each row, float32."""
    top, total, picked, *_ = torch.ops.npu.npu_fused_linear_online_max_sum(
        _rows(hidden), weight.contiguous(), chosen, 0, len(weight)
    )
    losses, _ = torch.ops.npu.npu_fused_cross_entropy_loss_with_max_sum(top, total, picked)
    return losses, top, total


def _gradients(
    slopes: Tensor, hidden: Tensor, weight: Tensor, chosen: Tensor, top: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden and weight from those of the rows' losses."""
    nowhere = chosen.new_zeros((len(chosen) + 7) // 8, dtype=torch.uint8)
    rows, flat = _rows(hidden), (each.reshape(-1) for each in (top, total))
    to_hidden, to_weight = torch.ops.npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
        slopes.contiguous(), rows, weight.contiguous(), nowhere, chosen, 0.0, *flat
    )
    return to_hidden.view(hidden.shape), to_weight


def _chosen(targets: Tensor, ignored: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    chosen, foreign = classes_of(targets, ignored, len(weight))
    return chosen.reshape(-1), foreign


def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    ignored = targets == ignore_index
    chosen, foreign = _chosen(targets, ignored, weight)
    losses, top, total = _losses(hidden, weight, chosen)
    losses = losses.view(targets.shape).masked_fill(foreign, torch.nan).masked_fill(ignored, 0)
    shaped = top.view(targets.shape), total.view(targets.shape)
    return reduce(losses, ignored, reduction), *shaped


def _fake(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = hidden.new_empty(targets.shape, dtype=torch.float32)
    loss = torch.empty_like(rows) if reduction == "none" else rows.new_empty(())
    return loss, rows, torch.empty_like(rows)


def _backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    top: Tensor,
    total: Tensor,
    wanted: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    ignored = targets == ignore_index
    if reduction == "mean":
        grad = grad / counted_of(ignored)
    slopes = grad.expand(targets.shape).masked_fill(ignored, 0).reshape(-1)
    return _gradients(slopes, hidden, weight, _chosen(targets, ignored, weight)[0], top, total)


linear_cross_entropy = opaque(
    CONTRACTS["linear_cross_entropy"],
    "ascend",
    forward=_forward,
    fake=_fake,
    kept={"top": "...", "total": "..."},
    backward=_backward,
    saves=("hidden", "weight", "targets", "top", "total"),
)
"""Return -log p of the targets, reduced; keeps two float32 a row."""


def _chosen_forward(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float,
    ignore_index: int,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ignored = tokens == ignore_index
    chosen, foreign = _chosen(tokens, ignored, weight)
    losses, top, total = (each.view(tokens.shape) for each in _losses(hidden, weight, chosen))
    found = (-losses).masked_fill_(foreign, torch.nan).masked_fill_(ignored, 0)
    return found, torch.zeros_like(losses), top, total


def _chosen_fake(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float,
    ignore_index: int,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = hidden.new_empty(tokens.shape, dtype=torch.float32)
    return rows, torch.empty_like(rows), torch.empty_like(rows), torch.empty_like(rows)


def _chosen_backward(
    grad: Tensor,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    top: Tensor,
    total: Tensor,
    wanted: int,
    temperature: float,
    ignore_index: int,
    entropy: bool,
) -> tuple[Tensor, Tensor]:
    ignored = tokens == ignore_index
    slopes = (-grad).masked_fill(ignored, 0).reshape(-1)
    return _gradients(slopes, hidden, weight, _chosen(tokens, ignored, weight)[0], top, total)


_log_probs = opaque(
    CONTRACTS["token_log_probs"],
    "ascend",
    forward=_chosen_forward,
    fake=_chosen_fake,
    kept={"top": "...", "total": "..."},
    backward=_chosen_backward,
    saves=("hidden", "weight", "tokens", "top", "total"),
)


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
) -> Tensor:
    """Return log p of the tokens; keeps two float32 a row."""
    result: Tensor = _log_probs(hidden, weight, tokens, temperature, ignore_index, entropy)[0]
    return result


def _sizes(call: Call) -> str | None:
    """Decline fewer classes and more features than the kernels take."""
    classes, features = given(call)[1].shape
    if classes < LEAST_CLASSES:
        return f"takes {LEAST_CLASSES} classes or more, not {classes}"
    if features > MOST_FEATURES:
        return f"takes up to {MOST_FEATURES} features, not {features}"
    return empty(call)


def _loss(call: Call) -> str | None:
    """Decline what the fused loss does not offer."""
    if call.options[1] or call.options[2]:
        return "has no label smoothing and no z-loss"
    return _sizes(call)


def _probabilities(call: Call) -> str | None:
    """Decline what is not made of maximum and Σ exp alone."""
    if call.options[0] != 1:
        return f"has no temperature but 1, and here is {call.options[0]}"
    if call.options[2]:
        return "makes no entropies"
    return _sizes(call)


IMPLEMENTATIONS = (
    Implementation(
        operator="linear_cross_entropy",
        backend="ascend",
        run=linear_cross_entropy,
        devices=NPU,
        dtypes=HALVES,
        refuses=_loss,
        merit="npu_fused_linear_online_max_sum: product and softmax in one kernel, without logits",
    ),
    Implementation(
        operator="token_log_probs",
        backend="ascend",
        run=token_log_probs,
        devices=NPU,
        dtypes=HALVES,
        refuses=_probabilities,
        merit="npu_fused_linear_online_max_sum: product and softmax in one kernel, without logits",
    ),
)
