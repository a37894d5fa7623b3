"""Rotary position embedding with tables of a head's full width."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BODIES"]

HALF, INTERLEAVE = 0, 1


def rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: int, out: Tensor) -> None:
    """``x * cos + rotate(x) * sin``."""
    _check(x, cos, sin, mode)
    out.copy_(x.float() * cos.float() + _rotate(x.float(), mode) * sin.float())


def rotary_v2(
    x: Tensor, cos: Tensor, sin: Tensor, mode: int, rotate: Tensor | None, out: Tensor
) -> None:
    """The same; `rotate` would be a rotation matrix."""
    if rotate is not None:
        raise ValueError("a rotation matrix is not implemented")
    rotary(x, cos, sin, mode, out)


def rotary_grad(
    dy: Tensor,
    cos: Tensor,
    sin: Tensor,
    x: Tensor | None,
    mode: int,
    dx: Tensor,
    dcos: Tensor | None,
    dsin: Tensor | None,
) -> None:
    """The gradient of `rotary`: of x, and of the tables where x is given."""
    _check(dy, cos, sin, mode)
    if x is not None:
        raise ValueError("gradients of the tables are not implemented")
    # The rotation is skew-symmetric: its transpose is its negative.
    dx.copy_(dy.float() * cos.float() - _rotate(dy.float() * sin.float(), mode))


def _rotate(x: Tensor, mode: int) -> Tensor:
    if mode == HALF:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack((-second, first), -1).flatten(-2)


def _check(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> None:
    """Enforce the limits that CANN documents."""
    if not x.dtype == cos.dtype == sin.dtype:
        raise ValueError(
            f"x and tables must share a dtype, got {x.dtype}, {cos.dtype}, {sin.dtype}"
        )
    if x.shape[-1] % 2 or x.shape[-1] >= 896:
        raise ValueError(f"head width must be even and below 896, got {x.shape[-1]}")
    if mode not in (HALF, INTERLEAVE):
        raise ValueError(f"mode must be 0 (half) or 1 (interleave), got {mode}")
    if mode == INTERLEAVE and x.ndim == 4 and cos.shape[0] != 1:
        raise ValueError("interleaved features need tables that the batch shares")
    if x.ndim == 4:  # (B, S, N, D), the layout of these bodies
        rows, heads = x.shape[0], x.shape[2]
        size = rows * heads if mode == INTERLEAVE else max(rows, heads)
        if size >= 1000:
            raise ValueError(f"{rows} rows and {heads} heads exceed the limit of 1,000")


BODIES: dict[str, Callable[..., None]] = {
    "aclnnRotaryPositionEmbedding": rotary,
    "aclnnRotaryPositionEmbeddingGrad": rotary_grad,
    "aclnnRotaryPositionEmbeddingV2": rotary_v2,
}
