"""Rotary embedding written directly into its result; the gradient is the inverse rotation."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.backends.cpu import on_cpu
from ms_kernels.operators.rotary.contract import CONTRACT


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of features of q and k."""
    cos, sin = cos.unsqueeze(2).to(q.dtype), sin.unsqueeze(2).to(q.dtype)
    rotated = (
        _Rotation.apply(features, cos, sin, interleaved)  # type: ignore[no-untyped-call]
        for features in (q, k)
    )
    return next(rotated), next(rotated)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, ctx.interleaved, -1), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    """Rotate x (B, S, heads, D) by angles (C, S, 1, R/2); `sign` is -1 for the inverse."""
    half = cos.shape[-1]
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    torch.mul(x[..., first], cos, out=result[..., first])
    result[..., first].addcmul_(x[..., second], sin, value=-sign)
    torch.mul(x[..., second], cos, out=result[..., second])
    result[..., second].addcmul_(x[..., first], sin, value=sign)
    if 2 * half < x.shape[-1]:
        result[..., 2 * half :] = x[..., 2 * half :]
    return result


IMPLEMENTATION = on_cpu(
    CONTRACT,
    rotary,
    "writes into the result, no temporaries; saves only the angles",
    dtypes=(torch.float32, torch.float64),
)
