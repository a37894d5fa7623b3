"""SwiGLU through npu_swiglu, which takes gate and up as one tensor.

If gate and up are adjacent in memory, as after splitting one projection, nothing is copied.
Otherwise they are concatenated in forward and again in backward, which avoids saving a second copy.
torch_npu's gradient is for the joined tensor; it is split here into those of gate and up.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.backends.ascend import on_npu
from ms_kernels.operators.swiglu.contract import CONTRACT


def concat_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate and up as one tensor (..., 2 I): a view if they are adjacent, else a copy."""
    plain = type(gate) in (Tensor, torch.nn.Parameter) and type(up) in (Tensor, torch.nn.Parameter)
    if torch.compiler.is_compiling() or not plain or gate.device.type == "meta":
        return torch.cat((gate, up), -1)
    width = gate.shape[-1]
    adjacent = (
        gate.stride() == up.stride()
        and gate.stride(-1) == 1
        and up.storage_offset() == gate.storage_offset() + width
        and gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    )
    if not adjacent:
        return torch.cat((gate, up), -1)
    # gate's rows, extended over up's columns.
    return gate.as_strided((*gate.shape[:-1], 2 * width), gate.stride())


class _SwiGlu(torch.autograd.Function):
    """``silu(gate) · up`` with its gradient."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        result: Tensor = torch.ops.npu.npu_swiglu(concat_gate_up(gate, up), -1)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        joined = concat_gate_up(*ctx.saved_tensors)
        grad_joined: Tensor = torch.ops.npu.npu_swiglu_backward(grad.contiguous(), joined, -1)
        return grad_joined.chunk(2, -1)


IMPLEMENTATION = on_npu(
    CONTRACT,
    _SwiGlu.apply,
    "npu_swiglu: one kernel, without a copy where gate and up are adjacent",
)
