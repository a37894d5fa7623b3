"""RMSNorm, alone or after an addition, in one pass over memory each way.

Saved for the backward pass: the input (or the sum) and one float32 number a row. The weight's
gradient is summed by a fixed number of programs, then over these: the same in every run.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.triton.configuration import norm_kernels, shares, whole_rows
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
    """Return the normalized rows, the sum (x itself if there is none) and 1 / rms."""
    rows = as_rows(x)
    others = rows if residual is None else as_rows(residual)
    result, scale = empty(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    total = x if residual is None else empty(x)
    constants = whole_rows(kernel, key_of(x), rows.shape[1])
    launch(
        f"{KERNELS}.rms_norm_forward",
        blocks(len(rows), constants["ROWS"]),
        x,
        *(rows, others, weight.contiguous(), result, total, scale),
        *(*rows.shape, rows.stride(0), others.stride(0), eps),
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
    """Return the gradients of x (..., H), `grad_sum` added to it if given, and of weight (H,)."""
    rows, pulls = as_rows(x), as_rows(grad)
    more = pulls if grad_sum is None else as_rows(grad_sum)
    constants = whole_rows(kernel, key_of(x), rows.shape[1])
    each, programs = shares(kernel, key_of(x), *rows.shape)
    grad_x = empty(x)
    parts = x.new_empty((programs, rows.shape[1]), dtype=torch.float32)
    launch(
        f"{KERNELS}.rms_norm_backward",
        programs,
        x,
        *(pulls, more, rows, weight.contiguous(), scale, grad_x, parts),
        *(*rows.shape, pulls.stride(0), more.stride(0), rows.stride(0), each),
        ADD=grad_sum is not None,
        **constants,
    )
    return grad_x, parts.sum(0).to(weight.dtype)


def norm_entries(
    tuned: tuple[TunedKernel, TunedKernel],
    kernels: str,
    chip: str,
    dtype: str,
    *,
    detail: str = "",
    flags: tuple[dict[str, Any], dict[str, Any]] = ({}, {}),
) -> Iterator[Entry]:
    """Yield a normalization's entries: a program holds whole rows, up to each of a few widths.

    Args:
        tuned: the forward and the backward kernel.
        kernels: the module that they stand in.
        chip: what it is compiled for.
        dtype: as in `DTYPES`.
        detail: what tells its entries from another operator's by the same kernels.
        flags: further constants of each.
    """
    tiles = "cdiv(rows, ROWS)", "cdiv(rows, rows_each)"
    for width in (128, 1024, 2048, 4096, 8192):
        for kernel, count, more in zip(tuned, tiles, flags, strict=True):
            yield entry(
                kernel.operator,
                f"{kernels}.{kernel.name}",
                dtype,
                f"{detail}{width}",
                {**whole_rows(kernel, TableKey(chip, DTYPES[dtype]), width), **more},
                count,
                fp32="MEAN SCALE DW DB eps",
                limits={"width": "BLOCK"},
            )


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield what a library holds."""
    flag = {"ADD": False}
    yield from norm_entries(TUNED, KERNELS, chip, dtype, flags=(flag, flag))


IMPLEMENTATION = on_gpu(
    CONTRACT,
    "one pass over memory each way; saves x and one number a row",
    tuned=TUNED,
    entries=entries,
    refuses=narrow_rows,
    forward=_forward,
    intermediates={"scale": "..."},
    backward=_backward,
    saves=("x", "weight", "scale"),
)
