"""A residual sum and its RMSNorm in blocks of rows; saves the sum and one scale per row."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.backends.cpu import on_cpu
from ms_kernels.operators.add_rms_norm.contract import CONTRACT
from ms_kernels.operators.rms_norm.cpu import differentiate, normalize


class _AddRmsNorm(torch.autograd.Function):
    """``rms_norm(x + residual)`` and the sum, with their gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        summed = torch.add(x, residual)
        result, scale = normalize(summed, weight, eps)
        ctx.save_for_backward(summed, weight, scale)
        ctx.set_materialize_grads(False)
        return result, summed

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_sum: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        summed, weight, scale = ctx.saved_tensors
        if grad is None:
            return grad_sum, grad_sum, None, None
        grad_x, grad_weight = differentiate(grad, grad_sum, summed, weight, scale)
        return grad_x, grad_x, grad_weight, None


IMPLEMENTATION = on_cpu(
    CONTRACT, _AddRmsNorm.apply, "blocks of rows in the cache; saves the sum and one value per row"
)
