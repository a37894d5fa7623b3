"""A residual sum and its RMSNorm through npu_add_rms_norm.

The operator has no gradient, so this module applies RMSNorm's gradient at the sum. The operator may
normalize the sum before rounding it, whereas the contract rounds first; in half precision the
results differ by less than one rounding of the sum.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.backends.ascend import on_npu, same_dtype
from ms_kernels.operators.add_rms_norm.contract import CONTRACT


class _AddRmsNorm(torch.autograd.Function):
    """``rms_norm(x + residual)`` and the sum, with their gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        result, scale, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, float(eps))
        ctx.save_for_backward(total, weight, scale)
        return result, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, scale = ctx.saved_tensors
        grad_x, grad_weight = torch.ops.npu.npu_rms_norm_backward(
            grad.contiguous(), total, weight, scale
        )
        grad_x = grad_x + grad_total
        return grad_x, grad_x, grad_weight.to(weight.dtype), None


IMPLEMENTATION = on_npu(
    CONTRACT,
    _AddRmsNorm.apply,
    "npu_add_rms_norm: sum and norm in one kernel",
    refuses=same_dtype,
)
