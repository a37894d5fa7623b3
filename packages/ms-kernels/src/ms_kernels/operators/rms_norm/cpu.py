"""RMSNorm in cache-sized blocks of rows; saves its input and one scale per row for backward."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.backends.cpu import blocks, on_cpu
from ms_kernels.contracts.call import accumulator
from ms_kernels.operators.rms_norm.contract import CONTRACT


class _RmsNorm(torch.autograd.Function):
    """``x / sqrt(mean(x²) + eps) · weight`` with its gradient."""

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
    """Return the normalized x (..., H) and the scale ``1 / rms`` of each row, (N, 1)."""
    flat = x.reshape(-1, x.shape[-1])
    wide = accumulator(x.dtype)
    norm = torch.linalg.vector_norm(flat, dim=-1, keepdim=True, dtype=wide)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    result = torch.empty_like(flat, memory_format=torch.contiguous_format)
    wide_weight = weight.to(wide)
    for rows in blocks(*flat.shape):
        torch.mul(flat[rows] * scale[rows], wide_weight, out=result[rows])
    return result.view(x.shape), scale


def differentiate(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight; `grad_sum` (..., H) is added to the first."""
    flat, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
    wide_weight = weight.to(scale.dtype)
    grad_x = torch.empty_like(flat, memory_format=torch.contiguous_format)
    grad_weight = torch.zeros_like(wide_weight)
    grad_sum = None if grad_sum is None else grad_sum.reshape(-1, x.shape[-1])
    # dx = r·w·g - x·r³·⟨w·g, x⟩ / H, and dw = Σ r·g·x over rows.
    for rows in blocks(*flat.shape):
        values, grad_block, r = flat[rows].to(scale.dtype), grad[rows].to(scale.dtype), scale[rows]
        product = values * grad_block
        grad_weight.addmv_(product.T, r.squeeze(-1))
        correction = (product @ wide_weight).unsqueeze(-1) * r.pow(3) / x.shape[-1]
        torch.mul(grad_block, wide_weight, out=product).mul_(r)
        if grad_sum is not None:
            product.add_(grad_sum[rows])
        torch.addcmul(product, values, correction, value=-1, out=grad_x[rows])
    return grad_x.view(x.shape), grad_weight.to(weight.dtype)


IMPLEMENTATION = on_cpu(
    CONTRACT, _RmsNorm.apply, "blocks of rows in the cache; saves x and one value per row"
)
