"""Layer normalization (Ba, Kiros and Hinton, 2016)."""

import torch
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Model, streaming
from ms_kernels.contracts.call import FLOATING, accumulator
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.options import eps_option


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return ``(x - mean) / sqrt(variance + eps) · weight + bias``, rounded once to x's dtype."""
    wide = x.to(accumulator(x.dtype))
    centered = wide - wide.mean(-1, keepdim=True)
    result = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps) * weight
    return (result if bias is None else result + bias).to(x.dtype)


CONTRACT = Contract(
    name="layer_norm",
    summary="(x - mean) / sqrt(variance + eps) · weight + bias over the last dim",
    arguments=(
        Argument(name="x", dims="... H"),
        Argument(name="weight", dims="H", dtypes=FLOATING),
        Argument(name="bias", dims="H", dtypes=FLOATING, like="weight", optional=True),
    ),
    options=(eps_option(1e-5),),
    returns="(... H), dtype of x",
    results={"result": "... H"},
    splits=("...",),
    positive="H",
    forward=streaming("... H", tensors=2, weights=2, flops=7),
    backward=streaming("... H", tensors=3, weights=3, flops=13),
    example={"...": 256, "H": 128},
    reference=layer_norm,
    ladders=(
        Ladder({"H": 64}, ("...",)),
        Ladder({"H": 1024}, ("...",)),
    ),
    model=Model(free=("...", "H")),
)
