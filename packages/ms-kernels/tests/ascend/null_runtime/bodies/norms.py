"""Normalizations and gates."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BODIES"]


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor) -> None:
    """``x / sqrt(mean(x²) + epsilon) · gamma`` over gamma's dims."""
    dims = tuple(range(-gamma.ndim, 0))
    wide = x.float()
    scale = (wide.square().mean(dims, keepdim=True) + epsilon).rsqrt()
    y.copy_(wide * scale * gamma.float())
    rstd.copy_(scale)


def rms_norm_grad(
    dy: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor, dx: Tensor, dgamma: Tensor
) -> None:
    """Gradients of `rms_norm`; gamma's in float32."""
    dims = tuple(range(-gamma.ndim, 0))
    normal = x.float() * rstd
    slope = dy.float() * gamma.float()
    dx.copy_(rstd * (slope - normal * (slope * normal).mean(dims, keepdim=True)))
    dgamma.copy_((dy.float() * normal).reshape(-1, *gamma.shape).sum(0))


def add_rms_norm(
    one: Tensor,
    other: Tensor,
    gamma: Tensor,
    epsilon: float,
    y: Tensor,
    rstd: Tensor,
    total: Tensor,
) -> None:
    """`rms_norm` of a sum, and the sum; what is normalized is the sum before it was rounded."""
    wide = one.float() + other.float()
    rms_norm(wide, gamma, epsilon, y, rstd)
    total.copy_(wide)


def layer_norm(
    x: Tensor,
    shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    out: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
) -> None:
    """``(x - mean) / sqrt(variance + epsilon) · weight + bias`` over the last dims."""
    dims = tuple(range(-len(shape), 0))
    wide = x.float()
    middle = wide.mean(dims, keepdim=True)
    scale = ((wide - middle).square().mean(dims, keepdim=True) + epsilon).rsqrt()
    result = (wide - middle) * scale
    result = result if weight is None else result * weight.float()
    out.copy_(result if bias is None else result + bias.float())
    if mean is not None:
        mean.copy_(middle)
    if rstd is not None:
        rstd.copy_(scale)


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: list[bool],
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """Gradients of `layer_norm`, those that are wanted."""
    dims = tuple(range(-len(shape), 0))
    normal = (x.float() - mean.float()) * rstd.float()
    slope = dy.float() if weight is None else dy.float() * weight.float()
    if wanted[0] and dx is not None:
        pull = slope.mean(dims, keepdim=True) + normal * (slope * normal).mean(dims, keepdim=True)
        dx.copy_(rstd.float() * (slope - pull))
    if wanted[1] and dweight is not None:
        dweight.copy_((dy.float() * normal).reshape(-1, *shape).sum(0))
    if wanted[2] and dbias is not None:
        dbias.copy_(dy.float().reshape(-1, *shape).sum(0))


def swi_glu(x: Tensor, dim: int, out: Tensor) -> None:
    """``silu(first half) · second half``."""
    gate, up = x.float().chunk(2, dim)
    out.copy_(gate * gate.sigmoid() * up)


def swi_glu_grad(grad: Tensor, x: Tensor, dim: int, out: Tensor) -> None:
    """The gradient of `swi_glu`."""
    gate, up = x.float().chunk(2, dim)
    slope, opening = grad.float(), gate.sigmoid()
    turn = opening * (1 + gate * (1 - opening))
    out.copy_(torch.cat((slope * up * turn, slope * gate * opening), dim))


def ge_glu(
    x: Tensor, dim: int, approximate: int, activate_left: bool, out: Tensor, gelu: Tensor
) -> None:
    """``gelu(one half) · other half``; the right one is gated unless `activate_left`."""
    gate, up = _halves(x, dim, activate_left)
    opened = gate * _gelu_share(gate, approximate)
    out.copy_(opened * up)
    gelu.copy_(opened)


def ge_glu_grad(
    dy: Tensor,
    x: Tensor,
    gelu: Tensor,
    dim: int,
    approximate: int,
    activate_left: bool,
    dx: Tensor,
) -> None:
    """The gradient of `ge_glu`, which is given the gated half again."""
    gate, up = _halves(x, dim, activate_left)
    slope = dy.float()
    to_gate, to_up = slope * up * _gelu_slope(gate, approximate), slope * gelu.float()
    dx.copy_(torch.cat((to_gate, to_up) if activate_left else (to_up, to_gate), dim))


def _halves(x: Tensor, dim: int, activate_left: bool) -> tuple[Tensor, Tensor]:
    left, right = x.float().chunk(2, dim)
    return (left, right) if activate_left else (right, left)


def _bend(gate: Tensor) -> Tensor:
    """What the tanh of the approximate GELU is taken of."""
    return math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)


def _gelu_share(gate: Tensor, approximate: int) -> Tensor:
    """``gelu(gate) / gate``."""
    if approximate:
        return 0.5 * (1 + _bend(gate).tanh())
    return 0.5 * (1 + torch.erf(gate / math.sqrt(2)))


def _gelu_slope(gate: Tensor, approximate: int) -> Tensor:
    share = _gelu_share(gate, approximate)
    if approximate:
        inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * gate**2)
        return share + gate * 0.5 * (1 - _bend(gate).tanh() ** 2) * inner
    return share + gate * torch.exp(-0.5 * gate**2) / math.sqrt(2 * math.pi)


BODIES: dict[str, Callable[..., None]] = {
    "aclnnAddRmsNorm": add_rms_norm,
    "aclnnGeGluV3": ge_glu,
    "aclnnGeGluV3Backward": ge_glu_grad,
    "aclnnLayerNorm": layer_norm,
    "aclnnLayerNormBackward": layer_norm_backward,
    "aclnnRmsNorm": rms_norm,
    "aclnnRmsNormGrad": rms_norm_grad,
    "aclnnSwiGlu": swi_glu,
    "aclnnSwiGluGrad": swi_glu_grad,
}
