"""Linear cross-entropy: the chip's matrix library and fused rows, one chunk of logits at a time.

A chunk's logits are float32; one kernel makes of them the losses and, in the inputs' dtype, their
gradient, which two more products spend at once. So a reduced loss costs three products of half
precision, and memory for one chunk. The gradients of hidden and weight are summed in float32 and
held so between forward and backward, as in the reference. Where the loss is not reduced, or
nothing is trained, only the losses are made; a backward pass then makes the logits again.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.triton.configuration import row_blocks
from ms_kernels.backends.triton.implementation import on_gpu
from ms_kernels.backends.triton.rows import as_rows, empty
from ms_kernels.core.entries import DTYPES, Entry, entry
from ms_kernels.core.launches import TableKey, key_of
from ms_kernels.core.plan import absent_grad, needs_grad
from ms_kernels.core.torch_operator import opaque
from ms_kernels.operators.cross_entropy.contract import LossOptions, counted_of, reduce
from ms_kernels.operators.cross_entropy.triton import (
    KERNELS,
    LOSS_TYPES,
    class_kernels,
    differentiate,
    loss_entry,
    loss_like,
    row_losses,
    slopes_of,
)
from ms_kernels.operators.linear_cross_entropy.contract import CONTRACT
from ms_kernels.operators.linear_cross_entropy.triton_logits import (
    SCALE_CAST,
    Sums,
    chunks,
    lift_of,
    lifted,
    scale_kernel,
    scaled,
)

FORWARD, BACKWARD, SCALE = TUNED = (
    *class_kernels(
        "linear_cross_entropy", "cross_entropy_forward cross_entropy_backward", hidden=True
    ),
    scale_kernel("linear_cross_entropy"),
)
MERIT = "half-precision products summed in float32, one chunk of logits at a time"


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *options: Any) -> Tensor:
    """Return what `cross_entropy` of ``hidden @ weight.T`` returns."""
    run = _of_rows
    if LossOptions(*options).reduction != "none" and torch.is_grad_enabled():
        if weight.requires_grad:
            run = _with_both if hidden.requires_grad else _with_weight
        elif hidden.requires_grad:
            run = _with_hidden
    result: Tensor = run(hidden, weight, targets, *options)
    return result


def _holding(name: str, *, of_hidden: bool, of_weight: bool) -> Callable[..., Any]:
    """Make the operator that holds the named gradients of a reduced loss."""

    def forward(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        settings = LossOptions(*options)
        rows, places = as_rows(hidden), targets.reshape(-1).contiguous()
        sums = Sums(rows, weight, of_hidden=of_hidden, of_weight=of_weight)
        losses = hidden.new_empty(len(rows), dtype=torch.float32)
        constants = row_blocks(FORWARD, key_of(hidden), len(weight))
        for part, logits, gradient in chunks(rows, weight, gradients=True):
            lift = lift_of(hidden.dtype)
            losses[part], _ = row_losses(logits, places[part], settings, constants, gradient, lift)
            sums.add(gradient, rows, weight, part)
        held_hidden = absent_grad(hidden).float() if sums.hidden is None else sums.hidden
        held_weight = absent_grad(weight).float() if sums.weight is None else sums.weight
        if of_hidden:
            held_hidden = held_hidden.view(hidden.shape)
        loss = reduce(losses, places == settings.ignore_index, settings.reduction)
        return loss, held_hidden, held_weight

    def fake(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        held_hidden = empty(hidden if of_hidden else absent_grad(hidden), torch.float32)
        held_weight = empty(weight if of_weight else absent_grad(weight), torch.float32)
        return loss_like(hidden, targets, *options), held_hidden, held_weight

    return opaque(
        CONTRACT,
        f"triton_{name}",
        forward=forward,
        fake=fake,
        intermediates={"held_hidden": "... H", "held_weight": "V H"},
        backward=_scale,
        saves=("hidden", "weight", "targets", "held_hidden", "held_weight"),
    )


def _scale(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    held_hidden: Tensor,
    held_weight: Tensor,
    grad_mask: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Return scaled copies of what the forward pass held, as the graph may be walked again."""
    settings = LossOptions(*options)
    if settings.reduction == "mean":
        grad = grad / counted_of(targets == settings.ignore_index)
    return (
        scaled(SCALE, held_hidden if needs_grad(grad_mask, 0) else None, grad, hidden),
        scaled(SCALE, held_weight if needs_grad(grad_mask, 1) else None, grad, weight),
    )


_with_both = _holding("holding", of_hidden=True, of_weight=True)
_with_hidden = _holding("holding_hidden", of_hidden=True, of_weight=False)
_with_weight = _holding("holding_weight", of_hidden=False, of_weight=True)


def _forward(hidden: Tensor, weight: Tensor, targets: Tensor, *options: Any) -> Tensor:
    settings = LossOptions(*options)
    rows, places = as_rows(hidden), targets.reshape(-1).contiguous()
    losses = hidden.new_empty(len(rows), dtype=torch.float32)
    constants = row_blocks(FORWARD, key_of(hidden), len(weight))
    for part, logits, _ in chunks(rows, weight):
        losses[part], _ = row_losses(logits, places[part], settings, constants)
    return reduce(losses.view(targets.shape), targets == settings.ignore_index, settings.reduction)


def _fake(hidden: Tensor, weight: Tensor, targets: Tensor, *options: Any) -> Tensor:
    return loss_like(hidden, targets, *options)


def _backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    grad_mask: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Make the logits again, chunk by chunk, now that the gradient of each row is known."""
    settings = LossOptions(*options)
    rows, places = as_rows(hidden), targets.reshape(-1).contiguous()
    of_hidden, of_weight = needs_grad(grad_mask, 0), needs_grad(grad_mask, 1)
    sums = Sums(rows, weight, of_hidden=of_hidden, of_weight=of_weight)
    slopes = slopes_of(grad, targets, settings).view(-1)
    peak, (slopes,) = lifted(hidden.dtype, slopes)
    walks = (row_blocks(each, key_of(hidden), len(weight)) for each in (FORWARD, BACKWARD))
    forward, back = walks
    for part, logits, gradient in chunks(rows, weight, gradients=True):
        _, totals = row_losses(logits, places[part], settings, forward)
        differentiate(logits, places[part], totals, slopes[part], gradient, settings, back)
        sums.add(gradient, rows, weight, part)
    return sums.scaled(SCALE, peak, hidden, weight)


_of_rows = opaque(
    CONTRACT,
    "triton",
    forward=_forward,
    fake=_fake,
    backward=_backward,
    saves=("hidden", "weight", "targets"),
)


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield what a library holds: the loss with its gradient, and the scaling of sums."""
    wide = {"DIFFERENTIATE": True}
    types = {**LOSS_TYPES, "fp32": f"LOGITS {LOSS_TYPES['fp32']}"}
    yield loss_entry(FORWARD, KERNELS, chip, dtype, "gradient", flags=wide, **types)
    constants = SCALE.values(TableKey(chip, DTYPES[dtype]))
    tiles = "cdiv(count, BLOCK)"
    yield entry(
        "linear_cross_entropy", SCALE_CAST, dtype, "", constants, tiles, fp32="X FACTOR factor"
    )


IMPLEMENTATION = on_gpu(CONTRACT, MERIT, tuned=TUNED, entries=entries, run=linear_cross_entropy)
