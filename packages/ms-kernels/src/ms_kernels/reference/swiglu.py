"""The gate of a SwiGLU feed-forward block (Shazeer, 2020)."""

import torch.nn.functional as F
from torch import Tensor

from ms_kernels.contract import Argument, Contract, Dims, Work, accumulator
from ms_kernels.reference.tolerance import GRADIENTS, RESULTS

__all__ = ["CONTRACT", "swiglu"]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) · up``, rounded once, to gate's dtype."""
    wide = accumulator(gate.dtype)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def _forward(dims: Dims, itemsize: int) -> Work:
    elements = dims["..."] * dims["I"]
    return Work(3 * elements * itemsize, 5 * elements)


def _backward(dims: Dims, itemsize: int) -> Work:
    elements = dims["..."] * dims["I"]
    return Work(5 * elements * itemsize, 10 * elements)


CONTRACT = Contract(
    name="swiglu",
    summary="silu(gate) · up",
    arguments=(
        Argument(name="gate", dims="... I"),
        Argument(name="up", dims="... I", like="gate"),
    ),
    returns="(... I), dtype of gate",
    results={"result": "... I"},
    splits=("...", "I"),
    positive="I",
    forward=_forward,
    backward=_backward,
    tolerance=RESULTS,
    gradient_tolerance=GRADIENTS,
    example={"...": 256, "I": 128},
    reference=swiglu,
)
