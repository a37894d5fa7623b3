"""Cross-entropy of ``hidden @ weight.T``, in chunks of logits.

Rows are taken in chunks. A chunk's logits turn into their own gradient in place, which is spent on
the gradients of hidden and weight at once; so a reduced loss costs three matrix products, as the
plain way does, and memory for one chunk.

With ``reduction="none"`` the gradient of each row is known only in the backward pass, which makes
the logits again, unless one chunk was all there is. On the CPU it foresees that most rows will
have the same: then both gradients are made in the forward pass as well, hidden's for a gradient of
one, to be scaled row by row, and weight's as the sum of these; the backward pass makes again only
the rows that turn out different, such as those that a mask leaves out. Where all differ that costs
five products instead of four, where all are alike three.

The weight's gradient is a sum over all rows. It is kept in float32 until it is returned, also
between forward and backward: added up in bfloat16 it loses small terms, and rounded to float16
before a loss scale reaches it, it underflows.
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
    counted_of,
    cross_entropy,
    reduce,
)
from ms_kernels.operators.linear_cross_entropy.chunked_logits import Sums, chunk_rows_of, chunks_of


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
    if transforms_active():
        # A torch.func transform cannot follow the chunks, whose gradients are written in place.
        wide = accumulator(hidden.dtype)
        logits = hidden.to(wide) @ weight.to(wide).T
        return cross_entropy(logits, targets, ignore_index, label_smoothing, z_loss, reduction)
    if chunk_rows is None:
        chunk_rows = chunk_rows_of(hidden, weight)
    training = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    # Comparing gradients would wait for an accelerator, and torch.compile cannot branch on them.
    foresees = (
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
        foresees,
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
        foresees: bool,
    ) -> Tensor:
        ignored = targets == options.ignore_index
        losses = hidden.new_empty(targets.shape, dtype=accumulator(hidden.dtype))
        ctx.options, ctx.chunk_rows, ctx.foresees = options, chunk_rows, foresees
        known = options.reduction != "none" or foresees
        sums = Sums(hidden, weight, ctx.needs_input_grad) if training and known else None
        for rows, logits in chunks_of(hidden, weight, chunk_rows):
            losses[rows] = _differentiate(logits, targets[rows], ignored[rows], options)
            if sums is not None:
                sums.add(logits, hidden[rows], weight, rows)
        if training:
            held = (sums.hidden, sums.weight) if sums is not None else (hidden, weight)
            # One chunk was all there is: spare the backward pass from making it again.
            kept = logits if sums is None and 0 < len(targets) <= chunk_rows else None
            again = (hidden, weight) if foresees else (None, None)
            ctx.save_for_backward(*held, targets, ignored, kept, *again)
            ctx.dtypes = hidden.dtype, weight.dtype
        return reduce(losses, ignored, options.reduction)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, second, targets, ignored, kept, *_ = ctx.saved_tensors
        if ctx.foresees:
            first, second = _scaled(ctx, first, second, grad)
        elif ctx.options.reduction == "none":
            first, second = _again(ctx, first, second, targets, ignored, kept, grad)
        else:
            if ctx.options.reduction == "mean":
                grad = grad / counted_of(ignored)
            # The held sums stay as they are: the graph may be walked again.
            first = first if first is None else first * grad
            second = second if second is None else second * grad
        grads = (
            held if held is None else held.to(dtype)
            for held, dtype in zip((first, second), ctx.dtypes, strict=True)
        )
        return (*grads, *(None,) * 5)


def _scaled(
    ctx: Any, first: Tensor | None, second: Tensor | None, grad: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Scale what was made for a gradient of one; make rows again that differ from most."""
    _, _, targets, ignored, _, hidden, weight = ctx.saved_tensors
    first = None if first is None else first * grad.unsqueeze(-1)
    if second is None:
        return first, None
    counted = grad[~ignored]
    usual = counted.mode().values if counted.numel() else grad.new_zeros(())
    if 2 * int((counted == usual).sum()) < counted.numel():
        usual = torch.zeros_like(usual)  # all differ: leave nothing of the sum
    rows = ((grad != usual) & ~ignored).nonzero().squeeze(-1)
    second = second * usual
    if rows.numel():
        part = hidden.index_select(0, rows), targets[rows], ignored[rows], grad[rows] - usual
        second += _weight_gradient(ctx, weight, *part)
    return first, second


def _weight_gradient(
    ctx: Any, weight: Tensor, hidden: Tensor, targets: Tensor, ignored: Tensor, grad: Tensor
) -> Tensor:
    """Make the logits of some rows again, and of these the gradient of the weight."""
    sums = Sums(hidden, weight, (False, True))
    for rows, logits in chunks_of(hidden, weight, ctx.chunk_rows):
        _differentiate(logits, targets[rows], ignored[rows], ctx.options)
        sums.add(logits, hidden[rows], weight, rows, grad[rows, None])
    assert sums.weight is not None
    return sums.weight


def _again(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignored: Tensor,
    kept: Tensor | None,
    grad: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Make the logits again, chunk by chunk, now that the gradient of each row is known."""
    sums = Sums(hidden, weight, ctx.needs_input_grad)
    if kept is not None:
        sums.add(kept, hidden, weight, slice(None), grad[:, None])
        return sums.hidden, sums.weight
    for rows, logits in chunks_of(hidden, weight, ctx.chunk_rows):
        _differentiate(logits, targets[rows], ignored[rows], ctx.options)
        sums.add(logits, hidden[rows], weight, rows, grad[rows, None])
    return sums.hidden, sums.weight


def _differentiate(
    logits: Tensor, targets: Tensor, ignored: Tensor, options: LossOptions
) -> Tensor:
    """Return the losses (R,) of logits (R, V), which become their own gradient in place."""
    _, label_smoothing, z_loss, _ = options
    chosen = targets.to(torch.int64).masked_fill(ignored, 0).unsqueeze(-1)
    picked = logits.gather(-1, chosen)
    top = logits.amax(-1, keepdim=True)
    mean = logits.mean(-1, keepdim=True) if label_smoothing else picked
    norm = logits.sub_(top).exp_().sum(-1, keepdim=True)
    total = norm.log() + top
    losses = total - (1 - label_smoothing) * picked - label_smoothing * mean
    losses = losses + z_loss * total.square()
    # In the logits' dtype: a bool times a float would be float32 for float64 too.
    counted = (~ignored).unsqueeze(-1).to(logits.dtype)
    logits.mul_(counted * (1 + 2 * z_loss * total) / norm)
    if label_smoothing:
        logits.sub_(counted * (label_smoothing / logits.shape[-1]))
    logits.scatter_add_(-1, chosen, counted * (label_smoothing - 1))
    return losses.squeeze(-1).masked_fill(ignored, 0)


def logits_work(dims: Dims, itemsize: int) -> Work:
    """Read hidden, weight and targets, and write a number a row: one product."""
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
