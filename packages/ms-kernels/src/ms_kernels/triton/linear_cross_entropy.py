"""Linear cross-entropy: the chip's matrix library and fused rows, one chunk of logits at a time.

A chunk's logits are float32; one kernel makes of them the losses and, in the inputs' dtype, their
gradient, which two more products spend at once. So a reduced loss costs three products of half
precision, and memory for one chunk. The gradients of hidden and weight are summed in float32 and
held so between forward and backward, as in the reference.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.reference.cross_entropy import reduce
from ms_kernels.triton.cross_entropy import differentiate, row_losses, scaled
from ms_kernels.triton.logit_chunks import LIFT, Sums, chunk_rows_of, lifted
from ms_kernels.triton.products import product

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    *,
    chunk_rows: int | None = None,
) -> Tensor:
    """Return what `cross_entropy` of ``hidden @ weight.T`` returns."""
    if chunk_rows is None:
        chunk_rows = chunk_rows_of(weight)
    training = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    losses: Tensor = _Chunked.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        targets.reshape(-1).contiguous(),
        (ignore_index, float(label_smoothing), float(z_loss)),
        reduction,
        chunk_rows,
        training,
    )
    return losses.view(targets.shape) if reduction == "none" else losses


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (N, H)
        weight: Tensor,  # (V, H)
        targets: Tensor,  # (N,)
        options: tuple[int, float, float],
        reduction: str,
        chunk_rows: int,
        training: bool,
    ) -> Tensor:
        ctx.options, ctx.reduction, ctx.chunk_rows = options, reduction, chunk_rows
        ctx.dtype, ctx.wanted = hidden.dtype, ctx.needs_input_grad[:2]
        now = training and reduction != "none"
        losses = hidden.new_empty(len(targets), dtype=torch.float32)
        sums = Sums(hidden, weight, ctx.wanted) if now else None
        for start in range(0, len(targets), chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits = product(hidden[rows], weight.T)
            gradient = torch.empty_like(logits, dtype=hidden.dtype) if sums else None
            factor = LIFT.get(hidden.dtype, 1.0)
            losses[rows], _ = row_losses(logits, targets[rows], *options, gradient, factor)
            if sums is not None and gradient is not None:
                sums.add(gradient, hidden[rows], weight, rows)
        if training:
            held = (sums.hidden, sums.weight) if sums else (hidden, weight)
            ctx.save_for_backward(*held, targets)
        return reduce(losses, targets == options[0], reduction)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, second, targets = ctx.saved_tensors
        if ctx.reduction == "none":
            grad, slopes = lifted(grad.contiguous(), ctx.dtype)
            first, second = _again(ctx, first, second, targets, slopes)
        elif ctx.reduction == "mean":
            grad = grad / (targets != ctx.options[0]).sum()
        lift = 1 / LIFT.get(ctx.dtype, 1.0)
        # The held sums stay as they are: the graph may be walked again.
        grads = (
            None if held is None else scaled(held, grad, lift, ctx.dtype)
            for held in (first, second)
        )
        return (*grads, *(None,) * 5)


def _again(
    ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, slopes: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Make the logits again, chunk by chunk, now that the gradient of each row is known."""
    sums = Sums(hidden, weight, ctx.wanted)
    for start in range(0, len(targets), ctx.chunk_rows):
        rows = slice(start, start + ctx.chunk_rows)
        logits = product(hidden[rows], weight.T)
        _, totals = row_losses(logits, targets[rows], *ctx.options)
        gradient = torch.empty_like(logits, dtype=hidden.dtype)
        differentiate(logits, targets[rows], totals, slopes[rows], gradient, *ctx.options)
        sums.add(gradient, hidden[rows], weight, rows)
    return sums.hidden, sums.weight
