"""Rotary position embedding by tables of the whole width of a head."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BODIES"]

HALF, INTERLEAVE = 0, 1


def rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: int, out: Tensor) -> None:
    """``x · cos + turn(x) · sin``."""
    _check(x, cos, sin, mode)
    out.copy_(x.float() * cos.float() + _turn(x.float(), mode) * sin.float())


def rotary_v2(
    x: Tensor, cos: Tensor, sin: Tensor, mode: int, rotate: Tensor | None, out: Tensor
) -> None:
    """The same; `rotate` would name a matrix that turns."""
    if rotate is not None:
        raise ValueError("a matrix that turns has no body here")
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
        raise ValueError("gradients of the tables have no body here")
    # The turn is skew: its transpose is its negative.
    dx.copy_(dy.float() * cos.float() - _turn(dy.float() * sin.float(), mode))


def _turn(x: Tensor, mode: int) -> Tensor:
    if mode == HALF:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack((-second, first), -1).flatten(-2)


def _check(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> None:
    """Refuse what CANN's documentation does."""
    if not x.dtype == cos.dtype == sin.dtype:
        raise ValueError(f"x is {x.dtype} and its tables {cos.dtype}, {sin.dtype}; one dtype fits")
    if x.shape[-1] % 2 or x.shape[-1] >= 896:
        raise ValueError(f"a head of {x.shape[-1]}; an even width below 896 fits")
    if mode not in (HALF, INTERLEAVE):
        raise ValueError(f"mode {mode}; 0 (half) and 1 (interleave) fit")
    if mode == INTERLEAVE and x.ndim == 4 and cos.shape[0] != 1:
        raise ValueError("interleaved features take tables shared by the batch")
    if x.ndim == 4:  # (B, S, N, D), the layout of these bodies
        rows, heads = x.shape[0], x.shape[2]
        most = rows * heads if mode == INTERLEAVE else max(rows, heads)
        if most >= 1000:
            raise ValueError(f"{rows} rows and {heads} heads are beyond the limit of 1,000")


BODIES: dict[str, Callable[..., None]] = {
    "aclnnRotaryPositionEmbedding": rotary,
    "aclnnRotaryPositionEmbeddingGrad": rotary_grad,
    "aclnnRotaryPositionEmbeddingV2": rotary_v2,
}
