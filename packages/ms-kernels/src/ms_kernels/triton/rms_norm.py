"""RMSNorm, alone or after an addition, in one pass over memory each way.

Saved for the backward pass: the input (or the sum) and one float32 number a row. The weight's
gradient is summed by a fixed number of programs, then over these: the same in every run.
"""

import torch
from torch import Tensor

from ms_kernels.library import opaque
from ms_kernels.reference import CONTRACTS
from ms_kernels.triton import configuration
from ms_kernels.triton.launching import blocks, launch
from ms_kernels.triton.rows import as_rows, empty, wanted_of

__all__ = ["add_rms_norm", "rms_norm"]


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    result, _, scale = _normalise(x, None, weight, eps)
    return result, scale


def _fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return empty(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, wanted: int, eps: float
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = _differentiate(grad, None, x, weight, scale)
    grad_x, grad_weight = wanted_of(wanted, (grad_x, grad_weight))
    return grad_x, grad_weight


rms_norm = opaque(
    CONTRACTS["rms_norm"],
    "triton",
    forward=_forward,
    fake=_fake,
    kept={"scale": "..."},
    backward=_backward,
    saves=("x", "weight", "scale"),
)


def _add_forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _normalise(x, residual, weight, eps)


def _add_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return empty(x), empty(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _add_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    summed: Tensor,
    weight: Tensor,
    scale: Tensor,
    wanted: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_weight = _differentiate(grad, grad_sum, summed, weight, scale)
    # An operator's results may not share their memory: the second is a copy, if both are wanted.
    both = wanted & 3 == 3
    grads = wanted_of(wanted, (grad_x, grad_x.clone() if both else grad_x, grad_weight))
    return grads[0], grads[1], grads[2]


add_rms_norm = opaque(
    CONTRACTS["add_rms_norm"],
    "triton",
    forward=_add_forward,
    fake=_add_fake,
    kept={"scale": "..."},
    backward=_add_backward,
    saves=("summed", "weight", "scale"),
)


def _operator(added: Tensor | None) -> str:
    return "rms_norm" if added is None else "add_rms_norm"


def _normalise(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised rows, the sum (x itself if there is none) and 1 / rms."""
    rows = as_rows(x)
    others = rows if residual is None else as_rows(residual)
    result, scale = empty(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    total = x if residual is None else empty(x)
    where = _operator(residual), "rms_norm_forward", configuration.place_of(x)
    constants = configuration.whole_rows(*where, rows.shape[1])
    launch(
        "rms_norm.rms_norm_forward",
        blocks(len(rows), constants["ROWS"]),
        x,
        *(rows, others, weight.contiguous(), result, total, scale),
        *(*rows.shape, rows.stride(0), others.stride(0), eps),
        ADD=residual is not None,
        **constants,
    )
    return result, total, scale


def _differentiate(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (..., H), `grad_sum` added to it if given, and of weight (H,)."""
    rows, pulls = as_rows(x), as_rows(grad)
    more = pulls if grad_sum is None else as_rows(grad_sum)
    where = _operator(grad_sum), "rms_norm_backward", configuration.place_of(x)
    constants = configuration.whole_rows(*where, rows.shape[1])
    each, programs = configuration.shares(*where, *rows.shape)
    grad_x = empty(x)
    parts = x.new_empty((programs, rows.shape[1]), dtype=torch.float32)
    launch(
        "rms_norm.rms_norm_backward",
        programs,
        x,
        *(pulls, more, rows, weight.contiguous(), scale, grad_x, parts),
        *(*rows.shape, pulls.stride(0), more.stride(0), rows.stride(0), each),
        ADD=grad_sum is not None,
        **constants,
    )
    return grad_x, parts.sum(0).to(weight.dtype)
