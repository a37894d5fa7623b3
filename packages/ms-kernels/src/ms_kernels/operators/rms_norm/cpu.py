"""RMSNorm in blocks of rows, saving its input and one number a row for the backward pass."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.backends.cpu import blocks, on_cpu
from ms_kernels.contracts.call import accumulator
from ms_kernels.operators.rms_norm.contract import CONTRACT


class _RmsNorm(torch.autograd.Function):
    """Returns ``x / sqrt(mean(x²) + eps) · weight``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        result, scale = normalize(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        return (*differentiate(grad, None, *ctx.saved_tensors), None)


def normalize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalized x (..., H) and what each row was scaled by, (N, 1)."""
    flat = x.reshape(-1, x.shape[-1])
    wide = accumulator(x.dtype)
    norm = torch.linalg.vector_norm(flat, dim=-1, keepdim=True, dtype=wide)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    result = torch.empty_like(flat, memory_format=torch.contiguous_format)
    weighting = weight.to(wide)
    for rows in blocks(*flat.shape):
        torch.mul(flat[rows] * scale[rows], weighting, out=result[rows])
    return result.view(x.shape), scale


def differentiate(
    grad: Tensor, more: Tensor | None, x: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, plus `more` (..., H) if there is any, and of weight."""
    flat, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
    weighting = weight.to(scale.dtype)
    grad_x = torch.empty_like(flat, memory_format=torch.contiguous_format)
    grad_weight = torch.zeros_like(weighting)
    more = None if more is None else more.reshape(-1, x.shape[-1])
    # dx = r·w·g - x·r³·⟨w·g, x⟩ / H, and dw = Σ r·g·x over rows.
    for rows in blocks(*flat.shape):
        values, slope, r = flat[rows].to(scale.dtype), grad[rows].to(scale.dtype), scale[rows]
        product = values * slope
        grad_weight.addmv_(product.T, r.squeeze(-1))
        pull = (product @ weighting).unsqueeze(-1) * r.pow(3) / x.shape[-1]
        torch.mul(slope, weighting, out=product).mul_(r)
        if more is not None:
            product.add_(more[rows])
        torch.addcmul(product, values, pull, value=-1, out=grad_x[rows])
    return grad_x.view(x.shape), grad_weight.to(weight.dtype)


IMPLEMENTATION = on_cpu(
    CONTRACT, _RmsNorm.apply, "blocks of rows in the cache; saves x and one number a row"
)
