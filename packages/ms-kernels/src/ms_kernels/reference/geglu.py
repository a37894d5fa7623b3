"""The gate of a GEGLU feed-forward block (Shazeer, 2020), exact or by tanh (Gemma)."""

import torch.nn.functional as F
from torch import Tensor

from ms_kernels.contract import Argument, Contract, Dims, Option, Work, accumulator
from ms_kernels.reference.tolerance import GRADIENTS, RESULTS
from ms_kernels.values import one_of

__all__ = ["CONTRACT", "geglu"]


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(gate) · up``, rounded once, to gate's dtype."""
    wide = accumulator(gate.dtype)
    return (F.gelu(gate.to(wide), approximate=approximate) * up.to(wide)).to(gate.dtype)


def _forward(dims: Dims, itemsize: int) -> Work:
    elements = dims["..."] * dims["I"]
    return Work(3 * elements * itemsize, 9 * elements)


def _backward(dims: Dims, itemsize: int) -> Work:
    elements = dims["..."] * dims["I"]
    return Work(5 * elements * itemsize, 18 * elements)


CONTRACT = Contract(
    name="geglu",
    summary="gelu(gate) · up",
    arguments=(
        Argument(name="gate", dims="... I"),
        Argument(name="up", dims="... I", like="gate"),
    ),
    options=(
        Option(
            name="approximate",
            default="none",
            holds=one_of("none", "tanh"),
            fits="'none' or 'tanh'",
            trials=("tanh",),
        ),
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
    reference=geglu,
)
