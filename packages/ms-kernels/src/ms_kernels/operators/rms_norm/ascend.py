"""RMSNorm through npu_rms_norm; the gradient is torch_npu's."""

import torch
from torch import Tensor

from ms_kernels.backends.ascend import empty, on_npu
from ms_kernels.contracts.call import Call, describe
from ms_kernels.operators.rms_norm.contract import CONTRACT


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return ``x / sqrt(mean(x²) + eps) · weight``; saves one float32 per row for backward."""
    result: Tensor = torch.ops.npu.npu_rms_norm(x, weight, float(eps))[0]
    return result


def _refuses(call: Call) -> str | None:
    """Decline a weight whose dtype is neither x's nor float32, as CANN does."""
    x, weight = call.present
    if weight.dtype not in (x.dtype, torch.float32):
        return f"needs a weight of {describe(x.dtype)} or float32, not {describe(weight.dtype)}"
    return empty(call)


IMPLEMENTATION = on_npu(
    CONTRACT,
    rms_norm,
    "npu_rms_norm: one kernel; saves x and one float32 per row",
    refuses=_refuses,
)
