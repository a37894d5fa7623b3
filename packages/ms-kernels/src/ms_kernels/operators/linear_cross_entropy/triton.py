"""Linear cross-entropy: vendor matrix products and fused row kernels over chunks of logits.

A chunk's logits are float32. One kernel computes the losses and the logits' gradient in the inputs'
dtype, and two more products compute the gradients of hidden and weight from it. A reduced
loss thus costs three half-precision products and memory for one chunk. The gradients are summed in
float32 and saved in float32 between forward and backward, as in the reference. Without a reduction,
or if nothing is trained, forward computes only the losses, and backward recomputes the logits.
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
from ms_kernels.operators.cross_entropy.contract import LossOptions, mean_divisor, reduce
from ms_kernels.operators.cross_entropy.triton import (
    KERNELS,
    LOSS_TYPES,
    class_kernels,
    differentiate,
    loss_entry,
    loss_like,
    row_grads_of,
    row_losses,
)
from ms_kernels.operators.linear_cross_entropy.contract import CONTRACT
from ms_kernels.operators.linear_cross_entropy.triton_logits import (
    SCALE_CAST,
    TritonGradientSums,
    chunks,
    gradient_scale,
    normalize_row_grads,
    scale_and_cast,
    scale_kernel,
)

FORWARD, BACKWARD, SCALE = TUNED = (
    *class_kernels(
        "linear_cross_entropy", "cross_entropy_forward cross_entropy_backward", hidden=True
    ),
    scale_kernel("linear_cross_entropy"),
)
MERIT = "half-precision products summed in float32, one chunk of logits at a time"


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *options: Any) -> Tensor:
    """Return `cross_entropy` of ``hidden @ weight.T``."""
    run = _of_rows
    if LossOptions(*options).reduction != "none" and torch.is_grad_enabled():
        if weight.requires_grad:
            run = _with_both if hidden.requires_grad else _with_weight
        elif hidden.requires_grad:
            run = _with_hidden
    result: Tensor = run(hidden, weight, targets, *options)
    return result


def _saving_gradients(name: str, *, of_hidden: bool, of_weight: bool) -> Callable[..., Any]:
    """Build the operator of a reduced loss that computes the selected gradients in forward."""

    def forward(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        settings = LossOptions(*options)
        rows, flat_targets = as_rows(hidden), targets.reshape(-1).contiguous()
        sums = TritonGradientSums(rows, weight, of_hidden=of_hidden, of_weight=of_weight)
        losses = hidden.new_empty(len(rows), dtype=torch.float32)
        constants = row_blocks(FORWARD, key_of(hidden), len(weight))
        # Per chunk: logits (R, V), then losses and their gradient in one pass, then two products.
        for part, logits, gradient in chunks(rows, weight, gradients=True):
            scale = gradient_scale(hidden.dtype)  # keeps small float16 gradients normal
            losses[part], _ = row_losses(
                logits, flat_targets[part], settings, constants, gradient, scale
            )
            sums.add(gradient, rows, weight, part)
        grad_hidden = absent_grad(hidden).float() if sums.hidden is None else sums.hidden
        grad_weight = absent_grad(weight).float() if sums.weight is None else sums.weight
        if of_hidden:
            grad_hidden = grad_hidden.view(hidden.shape)
        loss = reduce(losses, flat_targets == settings.ignore_index, settings.reduction)
        return loss, grad_hidden, grad_weight

    def fake(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_hidden = empty(hidden if of_hidden else absent_grad(hidden), torch.float32)
        grad_weight = empty(weight if of_weight else absent_grad(weight), torch.float32)
        return loss_like(hidden, targets, *options), grad_hidden, grad_weight

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
    """Return scaled copies of the saved gradients; backward may run again with retain_graph."""
    settings = LossOptions(*options)
    if settings.reduction == "mean":
        # forward summed the rows undivided
        grad = grad / mean_divisor(targets == settings.ignore_index)
    return (
        scale_and_cast(SCALE, held_hidden if needs_grad(grad_mask, 0) else None, grad, hidden),
        scale_and_cast(SCALE, held_weight if needs_grad(grad_mask, 1) else None, grad, weight),
    )


_with_both = _saving_gradients("holding", of_hidden=True, of_weight=True)
_with_hidden = _saving_gradients("holding_hidden", of_hidden=True, of_weight=False)
_with_weight = _saving_gradients("holding_weight", of_hidden=False, of_weight=True)


def _forward(hidden: Tensor, weight: Tensor, targets: Tensor, *options: Any) -> Tensor:
    settings = LossOptions(*options)
    rows, flat_targets = as_rows(hidden), targets.reshape(-1).contiguous()
    losses = hidden.new_empty(len(rows), dtype=torch.float32)
    constants = row_blocks(FORWARD, key_of(hidden), len(weight))
    for part, logits, _ in chunks(rows, weight):
        losses[part], _ = row_losses(logits, flat_targets[part], settings, constants)
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
    """Recompute the logits chunk by chunk, now that the gradient of each row is known."""
    settings = LossOptions(*options)
    rows, flat_targets = as_rows(hidden), targets.reshape(-1).contiguous()
    needs_hidden, needs_weight = needs_grad(grad_mask, 0), needs_grad(grad_mask, 1)
    sums = TritonGradientSums(rows, weight, of_hidden=needs_hidden, of_weight=needs_weight)
    row_grads = row_grads_of(grad, targets, settings).view(-1)
    # float16: divide by the largest row gradient, so that a loss scale cannot overflow.
    peak, (row_grads,) = normalize_row_grads(hidden.dtype, row_grads)
    constants = (row_blocks(kernel, key_of(hidden), len(weight)) for kernel in (FORWARD, BACKWARD))
    forward, back = constants
    # Per chunk: logits (R, V), then losses and their gradient in one pass, then two products.
    for part, logits, gradient in chunks(rows, weight, gradients=True):
        _, lse = row_losses(logits, flat_targets[part], settings, forward)
        differentiate(logits, flat_targets[part], lse, row_grads[part], gradient, settings, back)
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
    """Yield the kernels of an ahead-of-time library: loss with gradient, and scaling of sums."""
    flags = {"DIFFERENTIATE": True}
    types = {**LOSS_TYPES, "fp32": f"LOGITS {LOSS_TYPES['fp32']}"}
    yield loss_entry(FORWARD, KERNELS, chip, dtype, "gradient", flags=flags, **types)
    constants = SCALE.values(TableKey(chip, DTYPES[dtype]))
    tiles = "cdiv(count, BLOCK)"
    yield entry(
        "linear_cross_entropy", SCALE_CAST, dtype, "", constants, tiles, fp32="X FACTOR factor"
    )


IMPLEMENTATION = on_gpu(CONTRACT, MERIT, tuned=TUNED, entries=entries, run=linear_cross_entropy)
