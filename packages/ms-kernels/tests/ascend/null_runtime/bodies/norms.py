"""Normalizations and gates."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BODIES"]


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor) -> None:
    """``x / sqrt(mean(x^2) + epsilon) * gamma`` over gamma's dims."""
    dims = tuple(range(-gamma.ndim, 0))
    x32 = x.float()
    scale = (x32.square().mean(dims, keepdim=True) + epsilon).rsqrt()
    y.copy_(x32 * scale * gamma.float())
    rstd.copy_(scale)


def rms_norm_grad(
    dy: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor, dx: Tensor, dgamma: Tensor
) -> None:
    """Gradients of `rms_norm`; gamma's in float32."""
    dims = tuple(range(-gamma.ndim, 0))
    normed = x.float() * rstd
    grad = dy.float() * gamma.float()
    dx.copy_(rstd * (grad - normed * (grad * normed).mean(dims, keepdim=True)))
    dgamma.copy_((dy.float() * normed).reshape(-1, *gamma.shape).sum(0))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    epsilon: float,
    y: Tensor,
    rstd: Tensor,
    total: Tensor,
) -> None:
    """`rms_norm` of a sum, and the sum; the normalization uses the unrounded sum."""
    summed = x.float() + residual.float()
    rms_norm(summed, gamma, epsilon, y, rstd)
    total.copy_(summed)


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
    """``(x - mean) / sqrt(variance + epsilon) * weight + bias`` over the last dims."""
    dims = tuple(range(-len(shape), 0))
    x32 = x.float()
    center = x32.mean(dims, keepdim=True)
    scale = ((x32 - center).square().mean(dims, keepdim=True) + epsilon).rsqrt()
    result = (x32 - center) * scale
    result = result if weight is None else result * weight.float()
    out.copy_(result if bias is None else result + bias.float())
    if mean is not None:
        mean.copy_(center)
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
    grad_mask: list[bool],
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """Gradients of `layer_norm` that `grad_mask` selects."""
    dims = tuple(range(-len(shape), 0))
    normed = (x.float() - mean.float()) * rstd.float()
    grad = dy.float() if weight is None else dy.float() * weight.float()
    if grad_mask[0] and dx is not None:
        projection = grad.mean(dims, keepdim=True) + normed * (grad * normed).mean(
            dims, keepdim=True
        )
        dx.copy_(rstd.float() * (grad - projection))
    if grad_mask[1] and dweight is not None:
        dweight.copy_((dy.float() * normed).reshape(-1, *shape).sum(0))
    if grad_mask[2] and dbias is not None:
        dbias.copy_(dy.float().reshape(-1, *shape).sum(0))


def swi_glu(x: Tensor, dim: int, out: Tensor) -> None:
    """``silu(first half) * second half``."""
    gate, up = x.float().chunk(2, dim)
    out.copy_(gate * gate.sigmoid() * up)


def swi_glu_grad(grad: Tensor, x: Tensor, dim: int, out: Tensor) -> None:
    """The gradient of `swi_glu`."""
    gate, up = x.float().chunk(2, dim)
    grad_out, sigmoid = grad.float(), gate.sigmoid()
    silu_factor = sigmoid * (1 + gate * (1 - sigmoid))
    out.copy_(torch.cat((grad_out * up * silu_factor, grad_out * gate * sigmoid), dim))


def ge_glu(
    x: Tensor, dim: int, approximate: int, activate_left: bool, out: Tensor, gelu: Tensor
) -> None:
    """``gelu(gate) * up``; the right half is the gate unless `activate_left`."""
    gate, up = _halves(x, dim, activate_left)
    activated = gate * _gelu_factor(gate, approximate)
    out.copy_(activated * up)
    gelu.copy_(activated)


def ge_glu_grad(
    dy: Tensor,
    x: Tensor,
    gelu: Tensor,
    dim: int,
    approximate: int,
    activate_left: bool,
    dx: Tensor,
) -> None:
    """The gradient of `ge_glu`, from the input and the saved gelu."""
    gate, up = _halves(x, dim, activate_left)
    grad = dy.float()
    dgate, dup = grad * up * _gelu_slope(gate, approximate), grad * gelu.float()
    dx.copy_(torch.cat((dgate, dup) if activate_left else (dup, dgate), dim))


def _halves(x: Tensor, dim: int, activate_left: bool) -> tuple[Tensor, Tensor]:
    left, right = x.float().chunk(2, dim)
    return (left, right) if activate_left else (right, left)


def _tanh_argument(gate: Tensor) -> Tensor:
    """Return the argument of tanh in the approximate GELU."""
    return math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)


def _gelu_factor(gate: Tensor, approximate: int) -> Tensor:
    """``gelu(gate) / gate``."""
    if approximate:
        return 0.5 * (1 + _tanh_argument(gate).tanh())
    return 0.5 * (1 + torch.erf(gate / math.sqrt(2)))


def _gelu_slope(gate: Tensor, approximate: int) -> Tensor:
    factor = _gelu_factor(gate, approximate)
    if approximate:
        inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * gate**2)
        return factor + gate * 0.5 * (1 - _tanh_argument(gate).tanh() ** 2) * inner
    return factor + gate * torch.exp(-0.5 * gate**2) / math.sqrt(2 * math.pi)


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
