"""Root mean square normalization (Zhang and Sennrich, 2019)."""

import torch
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Model, streaming
from ms_kernels.contracts.call import FLOATING, accumulator
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.options import eps_option


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return ``x / sqrt(mean(x²) + eps) · weight``, rounded once to x's dtype."""
    wide = x.to(accumulator(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


CONTRACT = Contract(
    name="rms_norm",
    summary="x / sqrt(mean(x²) + eps) · weight over the last dim",
    arguments=(
        Argument(name="x", dims="... H"),
        Argument(name="weight", dims="H", dtypes=FLOATING),
    ),
    options=(eps_option(1e-6),),
    returns="(... H), dtype of x",
    results={"result": "... H"},
    splits=("...",),
    positive="H",
    forward=streaming("... H", tensors=2, weights=1, flops=4),
    backward=streaming("... H", tensors=3, weights=2, flops=10),
    example={"...": 256, "H": 128},
    reference=rms_norm,
    ladders=(
        Ladder({"H": 64}, ("...",)),
        Ladder({"H": 1024}, ("...",)),
    ),
    model=Model(free=("...", "H")),
)
