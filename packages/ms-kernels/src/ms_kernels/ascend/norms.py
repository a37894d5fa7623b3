"""RMSNorm, its sum with a residual and LayerNorm, each one kernel.

The gradients of the first and the last are torch_npu's; npu_add_rms_norm has none, so ours takes
that of RMSNorm at the sum. It may normalise the sum before it rounds it, where the contract rounds
first: for half precision the two differ by less than one rounding of the sum.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.ascend.limits import NPU, REALS, empty, given
from ms_kernels.contract import Call, describe
from ms_kernels.registry import Implementation

__all__ = ["IMPLEMENTATIONS", "add_rms_norm", "layer_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return ``x / sqrt(mean(x²) + eps) · weight``; keeps one float32 a row for the backward."""
    result: Tensor = torch.ops.npu.npu_rms_norm(x, weight, float(eps))[0]
    return result


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return ``rms_norm(x + residual)`` and the sum."""
    pair: tuple[Tensor, Tensor] = _AddRmsNorm.apply(x, residual, weight, float(eps))  # type: ignore[no-untyped-call]
    return pair


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        result, scale, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, eps)
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


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return ``(x - mean) / sqrt(variance + eps) · weight + bias``, by torch's own operator."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _rms(call: Call) -> str | None:
    """Decline a weight of a third dtype: CANN takes x's own or float32."""
    x, *_, weight = given(call)
    if weight.dtype not in (x.dtype, torch.float32):
        return f"takes a weight of {describe(x.dtype)} or float32, not {describe(weight.dtype)}"
    return empty(call)


def _same(call: Call) -> str | None:
    """Decline a weight of another dtype."""
    x, *_, weight = given(call)
    if weight.dtype != x.dtype:
        return f"takes a weight of {describe(x.dtype)}, as x is, not {describe(weight.dtype)}"
    return empty(call)


IMPLEMENTATIONS = (
    Implementation(
        operator="rms_norm",
        backend="ascend",
        run=rms_norm,
        devices=NPU,
        dtypes=REALS,
        refuses=_rms,
        merit="npu_rms_norm: one kernel, and one float32 a row saved beside x",
    ),
    Implementation(
        operator="add_rms_norm",
        backend="ascend",
        run=add_rms_norm,
        devices=NPU,
        dtypes=REALS,
        refuses=_same,
        merit="npu_add_rms_norm: sum and norm in one kernel",
    ),
    Implementation(
        operator="layer_norm",
        backend="ascend",
        run=layer_norm,
        devices=NPU,
        dtypes=REALS,
        refuses=_same,
        merit="torch_npu's own layer_norm: one kernel each way",
    ),
)
