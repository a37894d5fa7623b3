"""SwiGLU in one pass over memory each way; saves nothing but its inputs."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.triton import configuration
from ms_kernels.triton.kernels.gated import gated_backward, gated_forward
from ms_kernels.triton.launching import launch
from ms_kernels.triton.rows import as_rows

__all__ = ["swiglu"]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) · up``."""
    result: Tensor = _Gated.apply(gate, up, "silu")  # type: ignore[no-untyped-call]
    return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        gates, ups = as_rows(gate), as_rows(up)
        ctx.save_for_backward(gates, ups)
        ctx.activation = activation
        result = torch.empty_like(gates, memory_format=torch.contiguous_format)
        constants, tiles = _tiling(*gates.shape)
        launch(
            gated_forward,
            tiles,
            gates,
            *(gates, ups, result, *gates.shape, gates.stride(0), ups.stride(0)),
            ACTIVATION=activation,
            **constants,
        )
        return result.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gates, ups = ctx.saved_tensors
        grads = as_rows(grad)
        grad_gate = torch.empty_like(gates, memory_format=torch.contiguous_format)
        grad_up = torch.empty_like(grad_gate)
        constants, tiles = _tiling(*gates.shape)
        launch(
            gated_backward,
            tiles,
            gates,
            *(grads, gates, ups, grad_gate, grad_up, *gates.shape),
            *(grads.stride(0), gates.stride(0), ups.stride(0)),
            ACTIVATION=ctx.activation,
            **constants,
        )
        return grad_gate.view(grad.shape), grad_up.view(grad.shape), None


def _tiling(rows: int, width: int) -> tuple[dict[str, int], int]:
    """Return the constants of a launch and its tiles."""
    constants = configuration.elements(width)
    return constants, -(-rows // constants["ROWS"]) * -(-width // constants["BLOCK"])
