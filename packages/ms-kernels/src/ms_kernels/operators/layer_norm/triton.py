"""LayerNorm in one pass over memory each way; saves x and two float32 values per row."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ms_kernels.backends.triton.configuration import norm_kernels, rows_per_program, whole_rows
from ms_kernels.backends.triton.implementation import narrow_rows, on_gpu
from ms_kernels.backends.triton.launching import blocks, launch
from ms_kernels.backends.triton.rows import as_rows, empty
from ms_kernels.core.entries import Entry
from ms_kernels.core.launches import key_of
from ms_kernels.core.plan import absent_grad, needs_grad
from ms_kernels.operators.layer_norm.contract import CONTRACT
from ms_kernels.operators.rms_norm.triton import norm_entries

FORWARD, BACKWARD = TUNED = norm_kernels("layer_norm", "layer_norm")
KERNELS = f"{__package__}.kernels"


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = as_rows(x)
    result, mean = empty(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    scale = torch.empty_like(mean)
    weight = weight.contiguous()
    constants = whole_rows(FORWARD, key_of(x), rows.shape[1])
    launch(
        f"{KERNELS}.layer_norm_forward",
        blocks(len(rows), constants["ROWS"]),
        x,
        *(rows, weight, weight if bias is None else bias.contiguous(), result, mean, scale),
        *(*rows.shape, rows.stride(0), eps),
        BIAS=bias is not None,
        **constants,
    )
    return result, mean, scale


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    scale: Tensor,
    grad_mask: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, grad_rows = as_rows(x), as_rows(grad)
    constants = whole_rows(BACKWARD, key_of(x), rows.shape[1])
    program_rows, programs = rows_per_program(BACKWARD, key_of(x), *rows.shape)
    grad_x = empty(x)
    # (2, programs, H): partial gradients of weight and bias.
    partial_sums = x.new_empty((2, programs, rows.shape[1]), dtype=torch.float32)
    launch(
        f"{KERNELS}.layer_norm_backward",
        programs,
        x,
        *(
            grad_rows,
            rows,
            weight.contiguous(),
            mean,
            scale,
            grad_x,
            partial_sums[0],
            partial_sums[1],
        ),
        *(*rows.shape, grad_rows.stride(0), rows.stride(0), program_rows),
        **constants,
    )
    return (
        grad_x if needs_grad(grad_mask, 0) else absent_grad(x),
        partial_sums[0].sum(0).to(weight.dtype)
        if needs_grad(grad_mask, 1)
        else absent_grad(weight),
        partial_sums[1].sum(0).to(weight.dtype)
        if needs_grad(grad_mask, 2)
        else absent_grad(weight),
    )


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time library."""
    yield from norm_entries(TUNED, KERNELS, chip, dtype, flags=({"BIAS": True}, {}))


IMPLEMENTATION = on_gpu(
    CONTRACT,
    "one pass over memory each way; saves x and two values per row",
    tuned=TUNED,
    entries=entries,
    refuses=narrow_rows,
    forward=_forward,
    intermediates={"mean": "...", "scale": "..."},
    backward=_backward,
    saves=("x", "weight", "mean", "scale"),
)
