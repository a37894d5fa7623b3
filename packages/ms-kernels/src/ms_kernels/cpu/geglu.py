"""GEGLU in blocks of rows, saving nothing but its inputs for the backward pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.contract import accumulator
from ms_kernels.cpu.blocks import blocks

__all__ = ["geglu"]


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(gate) · up``."""
    result: Tensor = _Geglu.apply(gate, up, approximate)  # type: ignore[no-untyped-call]
    return result


class _Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.approximate = approximate
        width = gate.shape[-1]
        gates, ups = gate.reshape(-1, width), up.reshape(-1, width)
        wide = accumulator(gate.dtype)
        result = torch.empty_like(gates, memory_format=torch.contiguous_format)
        for rows in blocks(*gates.shape):
            opened = F.gelu(gates[rows].to(wide), approximate=approximate)
            torch.mul(opened, ups[rows], out=result[rows])
        return result.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        width = gate.shape[-1]
        gates, ups, grads = (each.reshape(-1, width) for each in (gate, up, grad))
        wide = accumulator(gate.dtype)
        grad_gate = torch.empty_like(gates, memory_format=torch.contiguous_format)
        grad_up = torch.empty_like(gates, memory_format=torch.contiguous_format)
        for rows in blocks(*gates.shape):
            opening, slope = gates[rows].to(wide), grads[rows].to(wide)
            torch.mul(F.gelu(opening, approximate=ctx.approximate), slope, out=grad_up[rows])
            torch.ops.aten.gelu_backward.grad_input(
                slope * ups[rows],
                opening,
                approximate=ctx.approximate,
                grad_input=grad_gate[rows],
            )
        return grad_gate.view(gate.shape), grad_up.view(gate.shape), None
