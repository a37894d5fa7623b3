"""RMSNorm, alone or after an addition, in one pass over memory each way.

Saved for the backward pass: the input (or the sum) and one float32 number a row. The weight's
gradient is summed by a fixed number of programs, then over these: the same in every run.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.triton import configuration
from ms_kernels.triton.kernels.rms_norm import rms_norm_backward, rms_norm_forward
from ms_kernels.triton.launching import chip_of, launch
from ms_kernels.triton.rows import as_rows

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return ``x / sqrt(mean(x²) + eps) · weight``."""
    result: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return result


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = as_rows(x)
        result, _, scale = normalise(rows, None, weight, eps)
        ctx.save_for_backward(rows, weight, scale)
        return result.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = differentiate(as_rows(grad), None, *ctx.saved_tensors)
        return grad_x.view(grad.shape), grad_weight, None


def normalise(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised rows (N, H), the sum (N, H) or x itself, and 1 / rms (N, 1)."""
    count, width = x.shape
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(result)
    scale = x.new_empty((count, 1), dtype=torch.float32)
    constants = configuration.whole_rows(width)
    other = x if residual is None else residual
    launch(
        rms_norm_forward,
        -(-count // constants["ROWS"]),
        x,
        *(x, other, weight.contiguous(), result, total, scale),
        *(count, width, x.stride(0), other.stride(0), eps),
        ADD=residual is not None,
        **constants,
    )
    return result, total, scale


def differentiate(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (N, H), `grad_sum` added to it if given, and of weight (H,)."""
    count, width = x.shape
    constants = configuration.whole_rows(width)
    blocks = -(-count // constants["ROWS"])
    each = -(-blocks // configuration.norm_programs(chip_of(x.device))) * constants["ROWS"]
    programs = -(-count // each) if count else 0
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    parts = x.new_empty((programs, width), dtype=torch.float32)
    more = grad if grad_sum is None else grad_sum
    launch(
        rms_norm_backward,
        programs,
        x,
        *(grad, more, x, weight.contiguous(), scale, grad_x, parts),
        *(count, width, grad.stride(0), more.stride(0), x.stride(0), each),
        ADD=grad_sum is not None,
        **constants,
    )
    return grad_x, parts.sum(0).to(weight.dtype)
