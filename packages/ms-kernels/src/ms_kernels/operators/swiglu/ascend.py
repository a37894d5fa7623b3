"""SwiGLU through npu_swiglu, which takes both halves as one tensor.

Where gate and up stand side by side already, as after one projection cut in two, nothing is
copied; otherwise they are joined, forward and again backward, rather than kept twice. torch_npu's
gradient is of the joined tensor; ours is of gate and up.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.backends.ascend import on_npu
from ms_kernels.operators.swiglu.contract import CONTRACT


def join(gate: Tensor, up: Tensor) -> Tensor:
    """Return (..., 2 I): a view of both if they stand side by side, or a new tensor."""
    plain = type(gate) in (Tensor, torch.nn.Parameter) and type(up) in (Tensor, torch.nn.Parameter)
    if torch.compiler.is_compiling() or not plain or gate.device.type == "meta":
        return torch.cat((gate, up), -1)
    width = gate.shape[-1]
    beside = (
        gate.stride() == up.stride()
        and gate.stride(-1) == 1
        and up.storage_offset() == gate.storage_offset() + width
        and gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    )
    if not beside:
        return torch.cat((gate, up), -1)
    return gate.as_strided((*gate.shape[:-1], 2 * width), gate.stride())


class _SwiGlu(torch.autograd.Function):
    """Returns ``silu(gate) · up``."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        result: Tensor = torch.ops.npu.npu_swiglu(join(gate, up), -1)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        joined = join(*ctx.saved_tensors)
        found: Tensor = torch.ops.npu.npu_swiglu_backward(grad.contiguous(), joined, -1)
        return found.chunk(2, -1)


IMPLEMENTATION = on_npu(
    CONTRACT,
    _SwiGlu.apply,
    "npu_swiglu: one kernel, without a copy where gate and up stand side by side",
)
