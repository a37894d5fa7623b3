"""Cross-entropy that reads the logits once forward, and writes only their gradient backward."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.reference.cross_entropy import reduce
from ms_kernels.triton import configuration
from ms_kernels.triton.kernels.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_forward,
    scale_cast,
)
from ms_kernels.triton.launching import launch
from ms_kernels.triton.rows import as_rows

__all__ = ["cross_entropy", "row_losses", "scaled"]

SCALE_BLOCK = 2048


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Return ``-(1-s) log p[target] - s mean(log p) + z log²Z``."""
    losses: Tensor = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        logits, targets.contiguous(), ignore_index, float(label_smoothing), float(z_loss)
    )
    return reduce(losses, targets == ignore_index, reduction)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
    ) -> Tensor:
        rows = as_rows(logits)
        ctx.options = ignore_index, label_smoothing, z_loss
        losses, totals = row_losses(rows, targets, *ctx.options)
        ctx.save_for_backward(rows, targets, totals)
        return losses.view(targets.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, targets, totals = ctx.saved_tensors
        result = torch.empty_like(rows, memory_format=torch.contiguous_format)
        differentiate(rows, targets, totals, grad.contiguous(), result, *ctx.options)
        return (result.view(*targets.shape, rows.shape[-1]), *(None,) * 4)


def row_losses(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
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
        gradient: (N, V), is given the logits' gradient times `factor`; may be `logits` itself.
        factor: keeps float16 gradients out of the range of subnormal numbers.
    """
    count, classes = logits.shape
    losses = logits.new_empty(count, dtype=torch.float32)
    totals = torch.empty_like(losses)
    out = logits if gradient is None else gradient
    launch(
        cross_entropy_forward,
        count,
        logits,
        *(logits, targets, losses, totals, out, classes, logits.stride(0), out.stride(0)),
        *(ignore_index, label_smoothing, z_loss, factor),
        DIFFERENTIATE=gradient is not None,
        **configuration.row_blocks(classes),
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
) -> None:
    """Put the gradient of logits (N, V) into `gradient`, each row times its slope (N,)."""
    count, classes = logits.shape
    constants = configuration.row_blocks(classes)
    launch(
        cross_entropy_backward,
        count * -(-classes // constants["BLOCK"]),
        logits,
        *(logits, targets, totals, slopes, gradient),
        *(classes, logits.stride(0), gradient.stride(0), ignore_index, label_smoothing, z_loss),
        **constants,
    )


def scaled(x: Tensor, slope: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Return ``x · slope · factor`` in `dtype`, for a contiguous x and a slope of one element."""
    result = torch.empty_like(x, dtype=dtype)
    tiles = -(-x.numel() // SCALE_BLOCK)
    launch(scale_cast, tiles, x, x, slope, result, x.numel(), factor, BLOCK=SCALE_BLOCK)
    return result
