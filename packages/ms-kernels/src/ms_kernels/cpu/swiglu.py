"""SwiGLU in blocks of rows, saving nothing but its inputs for the backward pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.contract import accumulator
from ms_kernels.cpu.blocks import blocks

__all__ = ["swiglu"]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) · up``."""
    result: Tensor = _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return result


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        width = gate.shape[-1]
        gates, ups = gate.reshape(-1, width), up.reshape(-1, width)
        wide = accumulator(gate.dtype)
        result = torch.empty_like(gates, memory_format=torch.contiguous_format)
        for rows in blocks(*gates.shape):
            torch.mul(F.silu(gates[rows].to(wide)), ups[rows], out=result[rows])
        return result.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        width = gate.shape[-1]
        gates, ups, grads = (each.reshape(-1, width) for each in (gate, up, grad))
        wide = accumulator(gate.dtype)
        grad_gate = torch.empty_like(gates, memory_format=torch.contiguous_format)
        grad_up = torch.empty_like(gates, memory_format=torch.contiguous_format)
        for rows in blocks(*gates.shape):
            opening, slope = gates[rows].to(wide), grads[rows].to(wide)
            torch.mul(F.silu(opening), slope, out=grad_up[rows])
            torch.ops.aten.silu_backward.grad_input(
                slope * ups[rows], opening, grad_input=grad_gate[rows]
            )
        return grad_gate.view(gate.shape), grad_up.view(gate.shape)
