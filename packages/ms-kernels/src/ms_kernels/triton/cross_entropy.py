"""Cross-entropy that reads the logits once forward, and writes only their gradient backward."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ms_kernels.library import opaque
from ms_kernels.reference import CONTRACTS
from ms_kernels.reference.cross_entropy import counted_of, reduce
from ms_kernels.triton import configuration
from ms_kernels.triton.launching import blocks, launch
from ms_kernels.triton.rows import as_rows, empty

__all__ = ["cross_entropy", "differentiate", "loss_like", "row_losses", "slopes_of", "walk"]


def _forward(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    targets = targets.contiguous()
    constants = walk("cross_entropy", "cross_entropy_forward", logits, logits.shape[-1])
    options = ignore_index, label_smoothing, z_loss, constants
    losses, totals = row_losses(as_rows(logits), targets, *options)
    loss = reduce(losses.view(targets.shape), targets == ignore_index, reduction)
    # Without a reduction masks and sums made nothing new.
    return loss, totals.view(targets.shape)


def _fake(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    return loss_like(logits, targets, reduction), empty(targets, torch.float32)


def _backward(
    grad: Tensor,
    logits: Tensor,
    targets: Tensor,
    totals: Tensor,
    wanted: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> Tensor:
    result, slopes = empty(logits), slopes_of(grad, targets, ignore_index, reduction)
    constants = walk("cross_entropy", "cross_entropy_backward", logits, logits.shape[-1])
    options = ignore_index, label_smoothing, z_loss, constants
    rows = as_rows(logits)
    differentiate(rows, targets.contiguous(), totals, slopes, as_rows(result), *options)
    return result


cross_entropy = opaque(
    CONTRACTS["cross_entropy"],
    "triton",
    forward=_forward,
    fake=_fake,
    kept={"totals": "..."},
    backward=_backward,
    saves=("logits", "targets", "totals"),
)


def loss_like(like: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Return a tensor of the shape of a loss, without numbers."""
    return like.new_empty(targets.shape if reduction == "none" else (), dtype=torch.float32)


def slopes_of(grad: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Return the gradient of each row's loss, float32 and contiguous, from that of the result."""
    if reduction == "mean":
        grad = grad / counted_of(targets == ignore_index)
    return grad.to(torch.float32).expand(targets.shape).contiguous()


def walk(operator: str, kernel: str, first: Tensor, classes: int) -> dict[str, int]:
    """Return block and warps of a kernel along rows of `classes`; `first` is the operator's."""
    return configuration.row_blocks(operator, kernel, configuration.place_of(first), V=classes)


def row_losses(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    constants: Mapping[str, int],
    gradient: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return losses and log Σ exp, both float32 (N,), of logits (N, V).

    Args:
        logits: any stride between rows.
        targets: N of them, contiguous.
        ignore_index: the target of a row that does not count.
        label_smoothing: as for the operator.
        z_loss: as for the operator.
        constants: block and warps, as `walk` gives them.
        gradient: (N, V), is given the logits' gradient times `factor`; may be `logits` itself.
        factor: keeps float16 gradients out of the range of subnormal numbers.
    """
    count, classes = logits.shape
    losses = logits.new_empty(count, dtype=torch.float32)
    totals = torch.empty_like(losses)
    out = logits if gradient is None else gradient
    launch(
        "cross_entropy.cross_entropy_forward",
        count,
        logits,
        *(logits, targets, losses, totals, out, classes, logits.stride(0), out.stride(0)),
        *(ignore_index, float(label_smoothing), float(z_loss), factor),
        DIFFERENTIATE=gradient is not None,
        **constants,
    )
    return losses, totals


def differentiate(
    logits: Tensor,
    targets: Tensor,
    totals: Tensor,
    slopes: Tensor,
    gradient: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    constants: Mapping[str, int],
) -> None:
    """Put the gradient of logits (N, V) into `gradient`, each row times its slope (N,)."""
    count, classes = logits.shape
    launch(
        "cross_entropy.cross_entropy_backward",
        count * blocks(classes, constants["BLOCK"]),
        logits,
        *(logits, targets, totals, slopes, gradient, classes, logits.stride(0)),
        *(gradient.stride(0), ignore_index, float(label_smoothing), float(z_loss)),
        **constants,
    )
