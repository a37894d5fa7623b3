"""Cross-entropy from logits."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BODIES"]


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
}
