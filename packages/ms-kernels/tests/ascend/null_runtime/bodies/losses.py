"""Cross-entropy from logits, and from the product that makes them."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..signatures import Single

__all__ = ["BODIES"]


REDUCTIONS = ("none", "mean", "sum")
"""By the number that the calls pass."""


def nll_loss(
    log_probs: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    out: Tensor,
    total: Tensor,
) -> None:
    """``-log p[target]`` of each row, its mean or sum, and the weight of all rows."""
    picked, weights = _picked(log_probs, targets, weight, ignore_index)
    total.copy_(weights.sum().view_as(total))
    losses = -picked * weights
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
    _, weights = _picked(log_probs, targets, weight, ignore_index)
    slopes = -weights * grad.float()
    if REDUCTIONS[reduction] == "mean":
        slopes = slopes / total.float()
    kept = targets.masked_fill(targets == ignore_index, 0).long()
    out.copy_(torch.zeros_like(log_probs.float()).scatter(-1, kept[:, None], slopes[:, None]))


def _picked(
    log_probs: Tensor, targets: Tensor, weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Each row's log p of its target, and the row's weight."""
    counted = targets != ignore_index
    kept = targets.masked_fill(~counted, 0).long()
    weights = counted.float() if weight is None else weight.float()[kept] * counted
    return log_probs.float().gather(-1, kept[:, None])[:, 0], weights


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
    """``-log p[target]`` of each row, its mean or sum; keeps all log p."""
    _plain(weight, label_smoothing, z_scale)
    logs = logits.float().log_softmax(-1)
    counted = _counted(targets, ignore_index, logits.shape[-1])
    picked = logs.gather(-1, targets.masked_fill(~counted, 0).long()[:, None])[:, 0]
    losses = -picked * counted
    if reduction != "none":
        losses = losses.sum().reshape(1)
    loss.copy_((losses / counted.sum() if reduction == "mean" else losses).view_as(loss))
    log_probs.copy_(logs)


def cross_entropy_grad(
    slope: Tensor,
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
    """The gradient of `cross_entropy`, from its log p."""
    _plain(weight, label_smoothing, z_scale)
    counted = _counted(targets, ignore_index, log_probs.shape[-1])
    chosen = targets.masked_fill(~counted, 0).long()[:, None]
    turn = log_probs.float().exp()
    turn.scatter_add_(-1, chosen, torch.full(chosen.shape, -1.0))
    pull = slope.float().expand(targets.shape) * counted
    out.copy_(turn * (pull / counted.sum() if reduction == "mean" else pull)[:, None])


def online_max_sum(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    start: int,
    end: int,
    top: Tensor,
    total: Tensor,
    picked: Tensor,
    mask: Tensor,
    masked: Tensor,
    logits_out: Tensor | None,
) -> None:
    """Each row's greatest logit, Σ exp of all less it, and the target's less it.

    The documentation counts `end` among the classes; CANN's kernel compares with `>=`, so that it
    is the first beyond them. Logits are rounded to half precision, as the kernel keeps them.
    """
    _halves(x, weight)
    if start < 0 or end < start:
        raise ValueError(f"classes from {start} to {end}; from 0 or more, and to no less, fits")
    logits = _half_logits(x, weight)
    outside = (target < start) | (target >= end)
    masked.copy_((target - start).masked_fill(outside, 0))
    top.copy_(logits.amax(-1))
    less = logits - top[:, None]
    total.copy_(less.exp().sum(-1))
    picked.copy_(less.gather(-1, masked.long()[:, None])[:, 0].masked_fill(outside, 0))
    spare = outside.new_ones(8 * len(mask) - len(outside))
    bits = torch.cat((outside, spare)).view(-1, 8) << torch.arange(7, -1, -1)
    mask.copy_(bits.sum(-1))
    if logits_out is not None and logits_out.numel():
        logits_out.copy_(logits)


def loss_with_max_sum(
    top: Tensor,
    total: Tensor,
    picked: Tensor,
    label_smoothing: Single,
    x: Tensor | None,
    weight: Tensor | None,
    logits: Tensor | None,
    loss: Tensor,
    softmax: Tensor | None,
) -> None:
    """``log Σ exp - target``, and the softmax of logits that are given."""
    if label_smoothing or x is not None or weight is not None:
        raise ValueError("label smoothing, input and weight are not taken; 0 and none fit")
    loss.copy_(total.log() - picked)
    if logits is not None and softmax is not None:
        softmax.copy_((logits.float() - top[:, None]).exp() / total[:, None])


def linear_loss_grad(
    slope: Tensor,
    x: Tensor,
    weight: Tensor,
    mask: Tensor,
    masked: Tensor,
    label_smoothing: Single,
    top: Tensor | None,
    total: Tensor | None,
    softmax: Tensor | None,
    to_x: Tensor,
    to_weight: Tensor,
) -> None:
    """The gradients of x and weight; the softmax is made of maximum and Σ exp if not given."""
    _halves(x, weight)
    if label_smoothing:
        raise ValueError(f"label smoothing {label_smoothing}; 0 fits")
    if len(weight) < 128:
        raise ValueError(f"{len(weight)} classes; 128 or more fit")
    if softmax is None:
        if top is None or total is None:
            raise ValueError("neither a softmax nor maximum and Σ exp")
        softmax = (_half_logits(x, weight) - top[:, None]).exp() / total[:, None]
    bits = mask[:, None] >> torch.arange(7, -1, -1, dtype=torch.uint8)
    inside = 1 - (bits & 1).view(-1)[: len(slope)].float()
    turn = softmax.float().clone()
    turn[torch.arange(len(turn)), masked.long()] -= inside
    # The cube unit takes factors of half precision.
    turn = (turn * slope[:, None]).to(x.dtype).float()
    to_x.copy_(turn @ weight.float())
    to_weight.copy_(turn.T @ x.float())


def _half_logits(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() @ weight.float().T).to(x.dtype).float()


def _halves(x: Tensor, weight: Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        raise ValueError(f"input of {x.dtype} and weight of {weight.dtype}; one of half fits")
    if x.shape[1] > 65_534:
        raise ValueError(f"{x.shape[1]} features; up to 65534 fit")


def _plain(weight: Tensor | None, label_smoothing: float, z_scale: float) -> None:
    if weight is not None or label_smoothing or z_scale:
        raise ValueError("class weights, label smoothing and z-loss have no body here")


def _counted(targets: Tensor, ignore_index: int, classes: int) -> Tensor:
    """Which rows count. A negative `ignore_index` names no class, CANN's documentation says."""
    counted = targets != ignore_index if ignore_index >= 0 else torch.ones_like(targets).bool()
    wrong = targets[counted & ((targets < 0) | (targets >= classes))]
    if wrong.numel():
        raise ValueError(f"target {wrong[0].item()}, which is no class of {classes}")
    return counted


BODIES: dict[str, Callable[..., None]] = {
    "aclnnCrossEntropyLoss": cross_entropy,
    "aclnnCrossEntropyLossGrad": cross_entropy_grad,
    "aclnnFusedCrossEntropyLossWithMaxSum": loss_with_max_sum,
    "aclnnFusedLinearCrossEntropyLossGrad": linear_loss_grad,
    "aclnnFusedLinearOnlineMaxSum": online_max_sum,
    "aclnnNLLLoss": nll_loss,
    "aclnnNLLLossBackward": nll_loss_backward,
}
