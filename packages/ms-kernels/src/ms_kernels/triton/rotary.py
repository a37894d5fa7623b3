"""Rotary embedding of queries and keys in one launch, and back in one; saves only the angles."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.triton.kernels.rotary import rotary_turn
from ms_kernels.triton.launching import launch, power_of_two
from ms_kernels.triton.rows import with_unit_stride

__all__ = ["rotary"]

TILE = 2048
"""Elements that one program turns."""


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of features of q and k."""
    result: tuple[Tensor, Tensor] = _Rotation.apply(  # type: ignore[no-untyped-call]
        q, k, cos.contiguous(), sin.contiguous(), interleaved
    )
    return result


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return turn(q, k, cos, sin, interleaved, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        turned = turn(grad_q, grad_k, cos, sin, ctx.interleaved, back=True)
        return (*turned, None, None, None)


def turn(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, back: bool
) -> tuple[Tensor, Tensor]:
    """Turn q (B, S, Hq, D) and k (B, S, Hk, D), backwards if `back`."""
    q, k = with_unit_stride(q), with_unit_stride(k)
    batch, positions, q_heads, width = q.shape
    k_heads, half = k.shape[2], cos.shape[-1]
    turned = (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        torch.empty_like(k, memory_format=torch.contiguous_format),
    )
    block = power_of_two(half)
    heads = min(max(TILE // (2 * block), 1), power_of_two(max(q_heads, k_heads)))
    rest = width - 2 * half
    launch(
        rotary_turn,
        batch * positions * (-(-q_heads // heads) + -(-k_heads // heads)),
        q,
        *(q, k, *turned, cos, sin, positions, q_heads, k_heads, half, width),
        *q.stride()[:3],
        *k.stride()[:3],
        *(cos.stride(0) if len(cos) > 1 else 0, cos.stride(1)),
        BACK=back,
        INTERLEAVED=interleaved,
        HEADS=heads,
        HALF=block,
        REST=power_of_two(rest) if rest else 0,
        num_warps=4,
    )
    return turned
