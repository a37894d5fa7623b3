"""GEGLU through npu_geglu, which takes gate and up joined as in `swiglu.ascend`.

The Meta kernel of npu_geglu_grad returns two tensors where its schema declares one, so it fails
with fake tensors (torch_npu 2.13.0). GEGLU is therefore registered as a separate torch operator
with its own fake implementation.
"""

import torch
from torch import Tensor

from ms_kernels.backends.ascend import on_npu
from ms_kernels.core.torch_operator import opaque
from ms_kernels.operators.geglu.contract import CONTRACT
from ms_kernels.operators.swiglu.ascend import concat_gate_up

GATE_FIRST = True
"""Apply GELU to the left half: npu_geglu's `activate_left`."""


def _geglu(gate: Tensor, up: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Return ``gelu(gate) · up`` and ``gelu(gate)``."""
    tanh = int(approximate == "tanh")
    result, gated = torch.ops.npu.npu_geglu(concat_gate_up(gate, up), -1, tanh, GATE_FIRST)
    return result, gated


def _fake_geglu(gate: Tensor, up: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    result = torch.empty_like(gate, memory_format=torch.contiguous_format)
    return result, torch.empty_like(result)


def _geglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, gated: Tensor, grad_mask: int, approximate: str
) -> tuple[Tensor, Tensor]:
    tanh = int(approximate == "tanh")
    joined = concat_gate_up(gate, up)
    grad_joined = torch.ops.npu.npu_geglu_grad(grad, joined, gated, -1, tanh, GATE_FIRST)
    grad_gate, grad_up = grad_joined.chunk(2, -1)
    return grad_gate.contiguous(), grad_up.contiguous()


IMPLEMENTATION = on_npu(
    CONTRACT,
    opaque(
        CONTRACT,
        "ascend",
        forward=_geglu,
        fake=_fake_geglu,
        intermediates={"gated": "... I"},
        backward=_geglu_backward,
        saves=("gate", "up", "gated"),
    ),
    "npu_geglu: one kernel, without a copy where gate and up are adjacent",
)
