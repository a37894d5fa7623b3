"""Rotary embedding of queries and keys in one launch, and back in one; saves only the angles."""

from torch import Tensor

from ms_kernels.library import opaque
from ms_kernels.reference import CONTRACTS
from ms_kernels.triton import configuration
from ms_kernels.triton.launching import blocks, launch
from ms_kernels.triton.rows import empty, wanted_of, with_unit_stride

__all__ = ["rotary"]


def _forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    return _turn(q, k, cos, sin, interleaved, back=False)


def _fake(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    return empty(q), empty(k)


def _backward(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, wanted: int, interleaved: bool
) -> tuple[Tensor, Tensor]:
    grads = wanted_of(wanted, _turn(grad_q, grad_k, cos, sin, interleaved, back=True))
    return grads[0], grads[1]


def _turn(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, back: bool
) -> tuple[Tensor, Tensor]:
    """Turn q (B, S, Hq, D) and k (B, S, Hk, D), backwards if `back`."""
    q, k, cos, sin = with_unit_stride(q), with_unit_stride(k), cos.contiguous(), sin.contiguous()
    batch, positions, q_heads, width = q.shape
    k_heads, half = k.shape[2], cos.shape[-1]
    turned = empty(q), empty(k)
    place, heads = configuration.place_of(q), max(q_heads, k_heads)
    constants = configuration.rotary(place, half, heads, width - 2 * half)
    heads = constants["HEADS"]
    launch(
        "rotary.rotary_turn",
        batch * positions * (blocks(q_heads, heads) + blocks(k_heads, heads)),
        q,
        *(q, k, *turned, cos, sin, positions, q_heads, k_heads, half, width),
        *q.stride()[:3],
        *k.stride()[:3],
        *(cos.stride(0) if len(cos) > 1 else 0, cos.stride(1)),
        BACK=back,
        INTERLEAVED=interleaved,
        **constants,
    )
    return turned


rotary = opaque(
    CONTRACTS["rotary"],
    "triton",
    forward=_forward,
    fake=_fake,
    backward=_backward,
    saves=("cos", "sin"),
)
