"""RMSNorm, optionally after a residual addition, in one pass over memory forward and backward.

The backward pass needs the input (or the sum) and one float32 per row. The weight gradient is
accumulated by a fixed number of programs and then summed over programs, so it is deterministic.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.triton.configuration import norm_kernels, rows_per_program, whole_rows
from ms_kernels.backends.triton.implementation import narrow_rows, on_gpu
from ms_kernels.backends.triton.launching import blocks, launch
from ms_kernels.backends.triton.rows import as_rows, empty, needed_grads
from ms_kernels.core.entries import DTYPES, Entry, entry
from ms_kernels.core.launches import TableKey, TunedKernel, key_of
from ms_kernels.operators.rms_norm.contract import CONTRACT

FORWARD, BACKWARD = TUNED = norm_kernels("rms_norm", "rms_norm")
KERNELS = f"{__package__}.kernels"


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    result, _, scale = normalize(FORWARD, x, None, weight, eps)
    return result, scale


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, grad_mask: int, eps: float
) -> tuple[Tensor, Tensor]:
    return needed_grads(grad_mask, differentiate(BACKWARD, grad, None, x, weight, scale))


def normalize(
    kernel: TunedKernel, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized rows, the sum (x itself without a residual) and 1 / rms."""
    rows = as_rows(x)
    residual_rows = rows if residual is None else as_rows(residual)
    result, scale = empty(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    # Without a residual the kernel writes no sum.
    total = x if residual is None else empty(x)
    constants = whole_rows(kernel, key_of(x), rows.shape[1])
    launch(
        f"{KERNELS}.rms_norm_forward",
        blocks(len(rows), constants["ROWS"]),
        x,
        *(rows, residual_rows, weight.contiguous(), result, total, scale),
        *(*rows.shape, rows.stride(0), residual_rows.stride(0), eps),
        ADD=residual is not None,
        **constants,
    )
    return result, total, scale


def differentiate(
    kernel: TunedKernel,
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (..., H) and weight (H,); `grad_sum` is added to the first."""
    rows, grad_rows = as_rows(x), as_rows(grad)
    grad_sum_rows = grad_rows if grad_sum is None else as_rows(grad_sum)
    constants = whole_rows(kernel, key_of(x), rows.shape[1])
    program_rows, programs = rows_per_program(kernel, key_of(x), *rows.shape)
    grad_x = empty(x)
    # One partial gradient of the weight per program.
    partial_sums = x.new_empty((programs, rows.shape[1]), dtype=torch.float32)
    launch(
        f"{KERNELS}.rms_norm_backward",
        programs,
        x,
        *(grad_rows, grad_sum_rows, rows, weight.contiguous(), scale, grad_x, partial_sums),
        *(*rows.shape, grad_rows.stride(0), grad_sum_rows.stride(0), rows.stride(0), program_rows),
        ADD=grad_sum is not None,
        **constants,
    )
    return grad_x, partial_sums.sum(0).to(weight.dtype)


def norm_entries(
    tuned: tuple[TunedKernel, TunedKernel],
    kernels: str,
    chip: str,
    dtype: str,
    *,
    detail: str = "",
    flags: tuple[dict[str, Any], dict[str, Any]] = ({}, {}),
) -> Iterator[Entry]:
    """Yield the library entries of a normalization, one pair per maximum row width.

    Args:
        tuned: forward and backward kernel.
        kernels: name of the module that defines them.
        chip: target chip.
        dtype: name of the dtype, a key of `DTYPES`.
        detail: name part that separates these entries from those of another operator that uses
            the same kernels.
        flags: extra constants of the forward and the backward kernel.
    """
    tiles = "cdiv(rows, ROWS)", "cdiv(rows, rows_per_part)"
    for width in (128, 1024, 2048, 4096, 8192):
        for kernel, count, extra in zip(tuned, tiles, flags, strict=True):
            yield entry(
                kernel.operator,
                f"{kernels}.{kernel.name}",
                dtype,
                f"{detail}{width}",
                {**whole_rows(kernel, TableKey(chip, DTYPES[dtype]), width), **extra},
                count,
                fp32="MEAN SCALE DW DB eps",
                limits={"width": "BLOCK"},
            )


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time library."""
    flag = {"ADD": False}
    yield from norm_entries(TUNED, KERNELS, chip, dtype, flags=(flag, flag))


IMPLEMENTATION = on_gpu(
    CONTRACT,
    "one pass over memory each way; saves x and one value per row",
    tuned=TUNED,
    entries=entries,
    refuses=narrow_rows,
    forward=_forward,
    intermediates={"scale": "..."},
    backward=_backward,
    saves=("x", "weight", "scale"),
)
