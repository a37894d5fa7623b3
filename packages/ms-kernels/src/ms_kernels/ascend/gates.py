"""SwiGLU and GEGLU through npu_swiglu and npu_geglu, which take both halves as one tensor.

Where gate and up stand side by side already, as after one projection cut in two, nothing is
copied; otherwise they are joined, forward and again backward, rather than kept twice. torch_npu's
gradient is of the joined tensor; ours is of gate and up.

The Meta kernel of npu_geglu_grad returns two tensors where its schema has one, so that fake
tensors fail in it (torch_npu 2.13.0). GEGLU is therefore a torch operator of its own, with shapes
of its own.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.ascend.limits import NPU, REALS, empty
from ms_kernels.library import opaque
from ms_kernels.reference import CONTRACTS
from ms_kernels.registry import Implementation

__all__ = ["IMPLEMENTATIONS", "geglu", "join", "swiglu"]

GATE_FIRST = True
"""Whether it is the left half that is gated: npu_geglu's `activate_left`."""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) · up``."""
    result: Tensor = _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return result


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


def _geglu(gate: Tensor, up: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Return ``gelu(gate) · up`` and ``gelu(gate)``."""
    tanh = int(approximate == "tanh")
    result, gated = torch.ops.npu.npu_geglu(join(gate, up), -1, tanh, GATE_FIRST)
    return result, gated


def _fake_geglu(gate: Tensor, up: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    result = torch.empty_like(gate, memory_format=torch.contiguous_format)
    return result, torch.empty_like(result)


def _geglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, gated: Tensor, wanted: int, approximate: str
) -> tuple[Tensor, Tensor]:
    tanh = int(approximate == "tanh")
    joined = join(gate, up)
    found = torch.ops.npu.npu_geglu_grad(grad, joined, gated, -1, tanh, GATE_FIRST)
    to_gate, to_up = found.chunk(2, -1)
    return to_gate.contiguous(), to_up.contiguous()


geglu = opaque(
    CONTRACTS["geglu"],
    "ascend",
    forward=_geglu,
    fake=_fake_geglu,
    kept={"gated": "... I"},
    backward=_geglu_backward,
    saves=("gate", "up", "gated"),
)
"""Return ``gelu(gate) · up``."""


IMPLEMENTATIONS = (
    Implementation(
        operator="swiglu",
        backend="ascend",
        run=swiglu,
        devices=NPU,
        dtypes=REALS,
        refuses=empty,
        merit="npu_swiglu: one kernel, without a copy where gate and up stand side by side",
    ),
    Implementation(
        operator="geglu",
        backend="ascend",
        run=geglu,
        devices=NPU,
        dtypes=REALS,
        refuses=empty,
        merit="npu_geglu: one kernel, without a copy where gate and up stand side by side",
    ),
)
