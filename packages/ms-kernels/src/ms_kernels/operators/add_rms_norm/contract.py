"""A residual sum and its root mean square normalization, in one pass over memory."""

import torch
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Model, streaming
from ms_kernels.contracts.call import FLOATING
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.options import eps_option
from ms_kernels.contracts.tolerance import SUMMED
from ms_kernels.operators.rms_norm.contract import rms_norm


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return ``rms_norm(x + residual)`` and the sum, which is rounded before normalization.

    The result is bitwise equal to the two separate steps, and backward needs only the sum.
    """
    summed = torch.add(x, residual)
    return rms_norm(summed, weight, eps), summed


CONTRACT = Contract(
    name="add_rms_norm",
    summary="s = x + residual, and s / sqrt(mean(s²) + eps) · weight",
    arguments=(
        Argument(name="x", dims="... H"),
        Argument(name="residual", dims="... H", like="x"),
        Argument(name="weight", dims="H", dtypes=FLOATING),
    ),
    options=(eps_option(1e-6),),
    returns="two tensors (... H), dtype of x: normalized, and the sum",
    results={"normed": "... H", "summed": "... H"},
    splits=("...",),
    positive="H",
    forward=streaming("... H", tensors=4, weights=1, flops=5),
    backward=streaming(
        "... H", tensors=4, weights=2, flops=11
    ),  # x and residual share one gradient
    tolerance=SUMMED,
    example={"...": 256, "H": 128},
    reference=add_rms_norm,
    ladders=(
        Ladder({"H": 64}, ("...",)),
        Ladder({"H": 1024}, ("...",)),
    ),
    model=Model(free=("...", "H")),
)
