"""Cross-entropy of ``hidden @ weight.T``, in chunks of logits.

Rows are processed in chunks. A chunk's logits are overwritten by their gradient, from which the
gradients of hidden and weight are computed immediately. A reduced loss therefore costs three matrix
products, as the unchunked computation does, and memory for one chunk.

With ``reduction="none"`` the gradient of each row is known only in the backward pass, which
recomputes the logits unless there was only one chunk. On the CPU the forward pass assumes that most
rows will get the same gradient: it computes hidden's gradient for a row gradient of 1, to be scaled
per row, and weight's as the sum over rows. The backward pass recomputes only rows whose gradient
differs, such as masked rows. This costs five products instead of four if all gradients differ, and
three if all are equal.

The weight gradient is a sum over all rows. It is kept in float32 until it is returned, also between
forward and backward: a bfloat16 sum loses small terms, and a float16 value underflows before the
loss scale is applied.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.contracts.arguments import Argument, Ladder, Work, indices
from ms_kernels.contracts.call import Dims, accumulator
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.indices import check_classes
from ms_kernels.contracts.tolerance import LOGITS
from ms_kernels.contracts.transforms import transforms_active
from ms_kernels.operators.cross_entropy.contract import (
    LOSS_OPTIONS,
    LossOptions,
    classes,
    cross_entropy,
    mean_divisor,
    reduce,
)
from ms_kernels.operators.linear_cross_entropy.chunked_logits import (
    GradientSums,
    chunk_rows_of,
    chunks_of,
)


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
    """Return `cross_entropy` of ``hidden @ weight.T``."""
    if transforms_active():
        # torch.func transforms do not support the chunks, whose gradients are written in place.
        wide = accumulator(hidden.dtype)
        logits = hidden.to(wide) @ weight.to(wide).T
        return cross_entropy(logits, targets, ignore_index, label_smoothing, z_loss, reduction)
    if chunk_rows is None:
        chunk_rows = chunk_rows_of(hidden, weight)
    training = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    # Comparing gradients would synchronize an accelerator; torch.compile cannot branch on them.
    precomputes = (
        training
        and reduction == "none"
        and targets.numel() > chunk_rows
        and type(targets) is Tensor
        and hidden.device.type == "cpu"
        and not torch.compiler.is_compiling()
    )
    result: Tensor = _Chunked.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        targets.reshape(-1),
        LossOptions(ignore_index, label_smoothing, z_loss, reduction),
        chunk_rows,
        training,
        precomputes,
    )
    return result.reshape(targets.shape) if reduction == "none" else result


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (N, H)
        weight: Tensor,  # (V, H)
        targets: Tensor,  # (N,)
        options: LossOptions,
        chunk_rows: int,
        training: bool,
        precomputes: bool,
    ) -> Tensor:
        ignored = targets == options.ignore_index
        losses = hidden.new_empty(targets.shape, dtype=accumulator(hidden.dtype))
        ctx.options, ctx.chunk_rows, ctx.precomputes = options, chunk_rows, precomputes
        fuses_gradients = options.reduction != "none" or precomputes
        sums = (
            GradientSums(hidden, weight, ctx.needs_input_grad)
            if training and fuses_gradients
            else None
        )
        for rows, logits in chunks_of(hidden, weight, chunk_rows):
            losses[rows] = _differentiate(logits, targets[rows], ignored[rows], options)
            if sums is not None:
                sums.add(logits, hidden[rows], weight, rows)
        if training:
            saved = (sums.hidden, sums.weight) if sums is not None else (hidden, weight)
            # There was only one chunk: save its logits, so that backward need not recompute them.
            saved_logits = logits if sums is None and 0 < len(targets) <= chunk_rows else None
            inputs = (hidden, weight) if precomputes else (None, None)
            ctx.save_for_backward(*saved, targets, ignored, saved_logits, *inputs)
            ctx.dtypes = hidden.dtype, weight.dtype
        return reduce(losses, ignored, options.reduction)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, second, targets, ignored, saved_logits, *_ = ctx.saved_tensors
        if ctx.precomputes:
            first, second = _scale_saved_grads(ctx, first, second, grad)
        elif ctx.options.reduction == "none":
            first, second = _recompute(ctx, first, second, targets, ignored, saved_logits, grad)
        else:
            if ctx.options.reduction == "mean":
                grad = grad / mean_divisor(ignored)
            # Not in place: with retain_graph=True the saved sums are used again.
            first = first if first is None else first * grad
            second = second if second is None else second * grad
        grads = (
            total if total is None else total.to(dtype)
            for total, dtype in zip((first, second), ctx.dtypes, strict=True)
        )
        return (*grads, *(None,) * 5)


def _scale_saved_grads(
    ctx: Any, first: Tensor | None, second: Tensor | None, grad: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Scale the gradients computed for a row gradient of 1; recompute rows that differ from it."""
    _, _, targets, ignored, _, hidden, weight = ctx.saved_tensors
    first = None if first is None else first * grad.unsqueeze(-1)
    if second is None:
        return first, None
    counted = grad[~ignored]
    usual = counted.mode().values if counted.numel() else grad.new_zeros(())
    if 2 * int((counted == usual).sum()) < counted.numel():
        usual = torch.zeros_like(usual)  # most differ: recompute all rows
    rows = ((grad != usual) & ~ignored).nonzero().squeeze(-1)
    second = second * usual
    if rows.numel():
        differing = hidden.index_select(0, rows), targets[rows], ignored[rows], grad[rows] - usual
        second += _weight_gradient(ctx, weight, *differing)
    return first, second


def _weight_gradient(
    ctx: Any, weight: Tensor, hidden: Tensor, targets: Tensor, ignored: Tensor, grad: Tensor
) -> Tensor:
    """Recompute the logits of the given rows and return their gradient of the weight."""
    sums = GradientSums(hidden, weight, (False, True))
    for rows, logits in chunks_of(hidden, weight, ctx.chunk_rows):
        _differentiate(logits, targets[rows], ignored[rows], ctx.options)
        sums.add(logits, hidden[rows], weight, rows, grad[rows, None])
    assert sums.weight is not None
    return sums.weight


def _recompute(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignored: Tensor,
    logits_grad: Tensor | None,
    grad: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Recompute the logits chunk by chunk, now that the gradient of each row is known."""
    sums = GradientSums(hidden, weight, ctx.needs_input_grad)
    if logits_grad is not None:
        sums.add(logits_grad, hidden, weight, slice(None), grad[:, None])
        return sums.hidden, sums.weight
    for rows, logits in chunks_of(hidden, weight, ctx.chunk_rows):
        _differentiate(logits, targets[rows], ignored[rows], ctx.options)
        sums.add(logits, hidden[rows], weight, rows, grad[rows, None])
    return sums.hidden, sums.weight


def _differentiate(
    logits: Tensor, targets: Tensor, ignored: Tensor, options: LossOptions
) -> Tensor:
    """Return the losses (R,) of logits (R, V), which are overwritten by their gradient."""
    _, label_smoothing, z_loss, _ = options
    class_index = targets.to(torch.int64).masked_fill(ignored, 0).unsqueeze(-1)
    picked = logits.gather(-1, class_index)
    top = logits.amax(-1, keepdim=True)
    mean = logits.mean(-1, keepdim=True) if label_smoothing else picked
    norm = logits.sub_(top).exp_().sum(-1, keepdim=True)
    log_z = norm.log() + top
    losses = log_z - (1 - label_smoothing) * picked - label_smoothing * mean
    losses = losses + z_loss * log_z.square()
    # In the logits' dtype: a bool times a Python float is float32 even where logits are float64.
    counted = (~ignored).unsqueeze(-1).to(logits.dtype)
    logits.mul_(counted * (1 + 2 * z_loss * log_z) / norm)
    if label_smoothing:
        logits.sub_(counted * (label_smoothing / logits.shape[-1]))
    logits.scatter_add_(-1, class_index, counted * (label_smoothing - 1))
    return losses.squeeze(-1).masked_fill(ignored, 0)


def logits_work(dims: Dims, itemsize: int) -> Work:
    """Read hidden, weight and targets and write one value per row: one matrix product."""
    rows, width, classes_ = dims["..."], dims["H"], dims["V"]
    return Work((rows + classes_) * width * itemsize + 12 * rows, 2 * rows * width * classes_)


def _backward(dims: Dims, itemsize: int) -> Work:
    rows, width, classes_ = dims["..."], dims["H"], dims["V"]
    return Work(2 * (rows + classes_) * width * itemsize, 4 * rows * width * classes_)


CONTRACT = Contract(
    name="linear_cross_entropy",
    summary="cross_entropy(hidden @ weight.T, targets) without holding all logits",
    arguments=(
        Argument(name="hidden", dims="... H"),
        Argument(name="weight", dims="V H", like="hidden"),
        indices("targets", "...", classes),
    ),
    options=LOSS_OPTIONS,
    returns="() or, with reduction='none', (...); float32",
    results={"loss": ""},
    wide=True,
    positive="H V",
    explain_error=lambda hidden, weight, targets, ignore_index, *_: check_classes(
        "linear_cross_entropy", targets, weight.shape[0], ignore_index
    ),
    forward=logits_work,
    backward=_backward,
    tolerance=LOGITS,
    example={"...": 512, "H": 64, "V": 256},
    reference=linear_cross_entropy,
    ladders=(Ladder({"H": 128, "V": 4096}, ("...",)),),
)
