"""Gated activations in cache-sized blocks of rows; saves only their inputs for backward."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.backends.cpu import blocks, on_cpu
from ms_kernels.contracts.call import accumulator
from ms_kernels.operators.swiglu.contract import CONTRACT

MERIT = "blocks of rows in the cache; saves only gate and up"


def gated(
    gate: Tensor, up: Tensor, activate: Callable[..., Tensor], slope: Callable[..., Any]
) -> Tensor:
    """Return ``activate(gate) · up``.

    Args:
        gate: (..., I).
        up: (..., I).
        activate: activation function, called with float32 rows.
        slope: torch's backward operator of the activation, called with a gradient and the same
            rows; writes into `grad_input`.
    """
    result: Tensor = _Gated.apply(gate, up, activate, slope)  # type: ignore[no-untyped-call]
    return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, *activation: Callable[..., Any]) -> Tensor:
        ctx.save_for_backward(gate, up)
        activate, _ = ctx.activation = activation
        width = gate.shape[-1]
        gates, ups = gate.reshape(-1, width), up.reshape(-1, width)
        wide = accumulator(gate.dtype)
        result = torch.empty_like(gates, memory_format=torch.contiguous_format)
        for rows in blocks(*gates.shape):
            torch.mul(activate(gates[rows].to(wide)), ups[rows], out=result[rows])
        return result.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        activate, slope = ctx.activation
        width = gate.shape[-1]
        gates, ups, grads = (tensor.reshape(-1, width) for tensor in (gate, up, grad))
        wide = accumulator(gate.dtype)
        grad_gate = torch.empty_like(gates, memory_format=torch.contiguous_format)
        grad_up = torch.empty_like(gates, memory_format=torch.contiguous_format)
        for rows in blocks(*gates.shape):
            gate_block, grad_block = gates[rows].to(wide), grads[rows].to(wide)
            torch.mul(activate(gate_block), grad_block, out=grad_up[rows])
            slope(grad_block * ups[rows], gate_block, grad_input=grad_gate[rows])
        return grad_gate.view(gate.shape), grad_up.view(gate.shape), None, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) · up``."""
    return gated(gate, up, F.silu, torch.ops.aten.silu_backward.grad_input)


IMPLEMENTATION = on_cpu(CONTRACT, swiglu, MERIT)
