"""The gate of a GEGLU feed-forward block (Shazeer, 2020), exact or with the tanh approximation."""

import torch.nn.functional as F
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Model, Option, streaming
from ms_kernels.contracts.call import accumulator
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.values import one_of


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(gate) · up``, rounded once to gate's dtype."""
    wide = accumulator(gate.dtype)
    return (F.gelu(gate.to(wide), approximate=approximate) * up.to(wide)).to(gate.dtype)


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
    forward=streaming("... I", tensors=3, flops=9),
    backward=streaming("... I", tensors=5, flops=18),
    example={"...": 256, "I": 128},
    reference=geglu,
    ladders=(
        Ladder({"I": 64}, ("...",)),
        Ladder({"I": 1408}, ("...",)),
    ),
    model=Model(free=("...", "I")),
)
