"""The gate of a SwiGLU feed-forward block (Shazeer, 2020)."""

import torch.nn.functional as F
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Model, streaming
from ms_kernels.contracts.call import accumulator
from ms_kernels.contracts.contract import Contract


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) · up``, rounded once to gate's dtype."""
    wide = accumulator(gate.dtype)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


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
    forward=streaming("... I", tensors=3, flops=5),
    backward=streaming("... I", tensors=5, flops=10),
    example={"...": 256, "I": 128},
    reference=swiglu,
    ladders=(
        Ladder({"I": 64}, ("...",)),
        Ladder({"I": 1408}, ("...",)),
    ),
    model=Model(free=("...", "I")),
)
