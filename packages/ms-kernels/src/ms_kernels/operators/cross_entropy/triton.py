"""Cross-entropy that reads the logits once forward and writes only their gradient backward."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.triton.configuration import WALK_DEFAULTS, WALKS, row_blocks, tuned_kernels
from ms_kernels.backends.triton.implementation import on_gpu
from ms_kernels.backends.triton.launching import blocks, launch
from ms_kernels.backends.triton.rows import as_rows, empty
from ms_kernels.core.entries import DTYPES, Entry, entry
from ms_kernels.core.launches import TableKey, TunedKernel, key_of
from ms_kernels.operators.cross_entropy.contract import CONTRACT, LossOptions, mean_divisor, reduce

KERNELS = f"{__package__}.kernels"


def class_kernels(operator: str, names: str, *, hidden: bool) -> tuple[TunedKernel, ...]:
    """Return kernels that loop over rows of logits, computed from hidden states if `hidden`."""
    sizes = ({"...": 4096, "V": 32768}, {"...": 4096, "V": 128256})
    return tuned_kernels(
        operator,
        names,
        sizes="V",
        tried_at=tuple({**size, "H": 1024} for size in sizes) if hidden else sizes,
        candidates=WALKS,
        defaults=WALK_DEFAULTS,
    )


FORWARD, BACKWARD = TUNED = class_kernels(
    "cross_entropy", "cross_entropy_forward cross_entropy_backward", hidden=False
)


def _forward(logits: Tensor, targets: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    settings, targets = LossOptions(*options), targets.contiguous()
    constants = row_blocks(FORWARD, key_of(logits), logits.shape[-1])
    losses, lse = row_losses(as_rows(logits), targets, settings, constants)
    loss = reduce(losses.view(targets.shape), targets == settings.ignore_index, settings.reduction)
    # With reduction="none" the loss is `losses`, which nothing else refers to: no copy is needed.
    return loss, lse.view(targets.shape)


def _fake(logits: Tensor, targets: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return loss_like(logits, targets, *options), empty(targets, torch.float32)


def _backward(
    grad: Tensor,
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad_mask: int,
    *options: Any,
) -> Tensor:
    settings = LossOptions(*options)
    result, row_grads = empty(logits), row_grads_of(grad, targets, settings)
    constants = row_blocks(BACKWARD, key_of(logits), logits.shape[-1])
    tensors = as_rows(logits), targets.contiguous(), lse, row_grads, as_rows(result)
    differentiate(*tensors, settings, constants)
    return result


def loss_like(like: Tensor, targets: Tensor, *options: Any) -> Tensor:
    """Return an uninitialized tensor with the shape of a loss."""
    shape = targets.shape if LossOptions(*options).reduction == "none" else ()
    return like.new_empty(shape, dtype=torch.float32)


def row_grads_of(grad: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
    """Expand the gradient of the result to the gradient per row, float32 and contiguous."""
    if options.reduction == "mean":
        grad = grad / mean_divisor(targets == options.ignore_index)
    return grad.to(torch.float32).expand(targets.shape).contiguous()


def row_losses(
    logits: Tensor,
    targets: Tensor,
    options: LossOptions,
    constants: Mapping[str, int],
    gradient: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return losses and log Σ exp, both float32 (N,), of logits (N, V).

    Args:
        logits: (N, V), any stride between rows.
        targets: (N,), contiguous.
        options: options of the operator.
        constants: block size and warps from `row_blocks`.
        gradient: (N, V), output for the logits' gradient times `factor`; may alias `logits`.
        factor: scale that keeps float16 gradients out of the subnormal range.
    """
    count, classes = logits.shape
    losses = logits.new_empty(count, dtype=torch.float32)
    lse = torch.empty_like(losses)
    # Without a gradient this pointer is not written.
    grad_out = logits if gradient is None else gradient
    launch(
        f"{KERNELS}.cross_entropy_forward",
        count,
        logits,
        *(logits, targets, losses, lse, grad_out, classes, logits.stride(0), grad_out.stride(0)),
        *(options.ignore_index, float(options.label_smoothing), float(options.z_loss), factor),
        DIFFERENTIATE=gradient is not None,
        **constants,
    )
    return losses, lse


def differentiate(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    row_grads: Tensor,
    gradient: Tensor,
    options: LossOptions,
    constants: Mapping[str, int],
) -> None:
    """Write the gradient of logits (N, V) to `gradient`; rows are scaled by `row_grads` (N,)."""
    count, classes = logits.shape
    launch(
        f"{KERNELS}.cross_entropy_backward",
        count * blocks(classes, constants["BLOCK"]),
        logits,
        *(logits, targets, lse, row_grads, gradient, classes, logits.stride(0)),
        *(gradient.stride(0), options.ignore_index),
        *(float(options.label_smoothing), float(options.z_loss)),
        **constants,
    )


def loss_entry(
    kernel: TunedKernel,
    module: str,
    chip: str,
    dtype: str,
    detail: str = "",
    *,
    flags: Mapping[str, Any],
    **types: str,
) -> Entry:
    """Return the library entry of a kernel of `module` that loops over rows of any width."""
    forward = kernel.name.endswith("forward")
    return entry(
        kernel.operator,
        f"{module}.{kernel.name}",
        dtype,
        detail,
        {**row_blocks(kernel, TableKey(chip, DTYPES[dtype]), 2**20), **flags},
        "rows" if forward else "rows * cdiv(classes, BLOCK)",
        extra=("rows",),
        **types,
    )


LOSS_TYPES = {"fp32": "LOSSES LSE ROW_GRADS smoothing z_loss factor", "i64": "TARGETS"}


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time library."""
    flags = {"DIFFERENTIATE": False}
    yield loss_entry(FORWARD, KERNELS, chip, dtype, flags=flags, **LOSS_TYPES)
    yield loss_entry(BACKWARD, KERNELS, chip, dtype, flags={}, **LOSS_TYPES)


IMPLEMENTATION = on_gpu(
    CONTRACT,
    "reads the logits once forward, and once more for their gradient",
    tuned=TUNED,
    entries=entries,
    forward=_forward,
    fake=_fake,
    intermediates={"lse": "..."},
    backward=_backward,
    saves=("logits", "targets", "lse"),
)
