"""Cross-entropy from logits, and from hidden states and the output weight."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..signatures import Single

__all__ = ["BODIES"]


REDUCTIONS = ("none", "mean", "sum")
"""Indexed by the reduction number in the calls."""


def nll_loss(
    log_probs: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    out: Tensor,
    total: Tensor,
) -> None:
    """``-log p[target]`` of each row, their mean or sum, and the total weight."""
    log_p, weights = _target_log_probs(log_probs, targets, weight, ignore_index)
    total.copy_(weights.sum().view_as(total))
    losses = -log_p * weights
    if reduction:
        losses = losses.sum() / (weights.sum() if REDUCTIONS[reduction] == "mean" else 1.0)
    out.copy_(losses.view_as(out))


def nll_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total: Tensor,
    out: Tensor,
) -> None:
    """The gradient of `nll_loss`."""
    _, weights = _target_log_probs(log_probs, targets, weight, ignore_index)
    grads = -weights * grad.float()
    if REDUCTIONS[reduction] == "mean":
        grads = grads / total.float()
    safe_targets = targets.masked_fill(targets == ignore_index, 0).long()
    out.copy_(
        torch.zeros_like(log_probs.float()).scatter(-1, safe_targets[:, None], grads[:, None])
    )


def _target_log_probs(
    log_probs: Tensor, targets: Tensor, weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return each row's log probability of its target, and the row's weight."""
    valid = targets != ignore_index
    safe_targets = targets.masked_fill(~valid, 0).long()
    weights = valid.float() if weight is None else weight.float()[safe_targets] * valid
    return log_probs.float().gather(-1, safe_targets[:, None])[:, 0], weights


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_scale: float,
    return_z: bool,
    loss: Tensor,
    log_probs: Tensor,
    z_loss: Tensor,
    lse: Tensor,
) -> None:
    """``-log p[target]`` of each row, their mean or sum; saves all log probabilities."""
    _require_plain(weight, label_smoothing, z_scale)
    all_log_probs = logits.float().log_softmax(-1)
    valid = _valid_targets(targets, ignore_index, logits.shape[-1])
    log_p = all_log_probs.gather(-1, targets.masked_fill(~valid, 0).long()[:, None])[:, 0]
    losses = -log_p * valid
    if reduction != "none":
        losses = losses.sum().reshape(1)
    loss.copy_((losses / valid.sum() if reduction == "mean" else losses).view_as(loss))
    log_probs.copy_(all_log_probs)


def cross_entropy_grad(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    z_slope: Tensor | None,
    lse: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_scale: float,
    out: Tensor,
) -> None:
    """The gradient of `cross_entropy`, from the saved log probabilities."""
    _require_plain(weight, label_smoothing, z_scale)
    valid = _valid_targets(targets, ignore_index, log_probs.shape[-1])
    safe_targets = targets.masked_fill(~valid, 0).long()[:, None]
    dlogits = log_probs.float().exp()
    dlogits.scatter_add_(-1, safe_targets, torch.full(safe_targets.shape, -1.0))
    row_grads = grad.float().expand(targets.shape) * valid
    out.copy_(dlogits * (row_grads / valid.sum() if reduction == "mean" else row_grads)[:, None])


def online_max_sum(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    start: int,
    end: int,
    row_max: Tensor,
    row_sum: Tensor,
    target_logit: Tensor,
    mask: Tensor,
    masked: Tensor,
    logits_out: Tensor | None,
) -> None:
    """Row maximum, sum of exp(logit - maximum), and the target's logit minus the maximum.

    The documentation includes `end` in the classes; CANN's kernel compares with `>=`, so `end` is
    the first class after the range. Logits are rounded to half precision, as in the kernel.
    """
    _require_half(x, weight)
    if start < 0 or end < start:
        raise ValueError(f"classes must satisfy 0 <= start <= end, got {start} to {end}")
    logits = _half_logits(x, weight)
    outside = (target < start) | (target >= end)
    masked.copy_((target - start).masked_fill(outside, 0))
    row_max.copy_(logits.amax(-1))
    shifted = logits - row_max[:, None]
    row_sum.copy_(shifted.exp().sum(-1))
    target_logit.copy_(shifted.gather(-1, masked.long()[:, None])[:, 0].masked_fill(outside, 0))
    padding = outside.new_ones(8 * len(mask) - len(outside))
    bits = torch.cat((outside, padding)).view(-1, 8) << torch.arange(7, -1, -1)
    mask.copy_(bits.sum(-1))
    if logits_out is not None and logits_out.numel():
        logits_out.copy_(logits)


def loss_with_max_sum(
    row_max: Tensor,
    row_sum: Tensor,
    target_logit: Tensor,
    label_smoothing: Single,
    x: Tensor | None,
    weight: Tensor | None,
    logits: Tensor | None,
    loss: Tensor,
    softmax: Tensor | None,
) -> None:
    """``log(sum exp) - target logit``, and the softmax if logits are passed."""
    if label_smoothing or x is not None or weight is not None:
        raise ValueError("label smoothing must be 0, and input and weight None")
    loss.copy_(row_sum.log() - target_logit)
    if logits is not None and softmax is not None:
        softmax.copy_((logits.float() - row_max[:, None]).exp() / row_sum[:, None])


def linear_loss_grad(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mask: Tensor,
    masked: Tensor,
    label_smoothing: Single,
    row_max: Tensor | None,
    row_sum: Tensor | None,
    softmax: Tensor | None,
    dx: Tensor,
    dweight: Tensor,
) -> None:
    """Gradients of x and weight; the softmax is recomputed from maximum and sum if absent."""
    _require_half(x, weight)
    if label_smoothing:
        raise ValueError(f"label smoothing must be 0, got {label_smoothing}")
    if len(weight) < 128:
        raise ValueError(f"needs at least 128 classes, got {len(weight)}")
    if softmax is None:
        if row_max is None or row_sum is None:
            raise ValueError("needs either a softmax or the row maximum and sum")
        softmax = (_half_logits(x, weight) - row_max[:, None]).exp() / row_sum[:, None]
    bits = mask[:, None] >> torch.arange(7, -1, -1, dtype=torch.uint8)
    inside = 1 - (bits & 1).view(-1)[: len(grad)].float()
    dlogits = softmax.float().clone()
    dlogits[torch.arange(len(dlogits)), masked.long()] -= inside
    # The cube unit takes half-precision factors.
    dlogits = (dlogits * grad[:, None]).to(x.dtype).float()
    dx.copy_(dlogits @ weight.float())
    dweight.copy_(dlogits.T @ x.float())


def _half_logits(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() @ weight.float().T).to(x.dtype).float()


def _require_half(x: Tensor, weight: Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        raise ValueError(f"input and weight must share a half dtype, got {x.dtype}, {weight.dtype}")
    if x.shape[1] > 65_534:
        raise ValueError(f"supports up to 65534 features, got {x.shape[1]}")


def _require_plain(weight: Tensor | None, label_smoothing: float, z_scale: float) -> None:
    if weight is not None or label_smoothing or z_scale:
        raise ValueError("class weights, label smoothing and z-loss are not implemented")


def _valid_targets(targets: Tensor, ignore_index: int, classes: int) -> Tensor:
    """Mask of the rows that count. CANN documents that a negative `ignore_index` is unused."""
    valid = targets != ignore_index if ignore_index >= 0 else torch.ones_like(targets).bool()
    invalid = targets[valid & ((targets < 0) | (targets >= classes))]
    if invalid.numel():
        raise ValueError(f"target {invalid[0].item()} is not one of the {classes} classes")
    return valid


BODIES: dict[str, Callable[..., None]] = {
    "aclnnCrossEntropyLoss": cross_entropy,
    "aclnnCrossEntropyLossGrad": cross_entropy_grad,
    "aclnnFusedCrossEntropyLossWithMaxSum": loss_with_max_sum,
    "aclnnFusedLinearCrossEntropyLossGrad": linear_loss_grad,
    "aclnnFusedLinearOnlineMaxSum": online_max_sum,
    "aclnnNLLLoss": nll_loss,
    "aclnnNLLLossBackward": nll_loss_backward,
}
