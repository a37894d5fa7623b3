"""Root mean square normalisation (Zhang and Sennrich, 2019)."""

import torch
from torch import Tensor

from ms_kernels.contract import FLOATING, Argument, Contract, Dims, Work, accumulator
from ms_kernels.reference.options import eps_option
from ms_kernels.reference.tolerance import GRADIENTS, RESULTS

__all__ = ["CONTRACT", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return ``x / sqrt(mean(x²) + eps) · weight``, rounded once, to x's dtype."""
    wide = x.to(accumulator(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def _forward(dims: Dims, itemsize: int) -> Work:
    elements = dims["..."] * dims["H"]
    return Work((2 * elements + dims["H"]) * itemsize, 4 * elements)


def _backward(dims: Dims, itemsize: int) -> Work:
    elements = dims["..."] * dims["H"]
    return Work((3 * elements + 2 * dims["H"]) * itemsize, 10 * elements)


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
    forward=_forward,
    backward=_backward,
    tolerance=RESULTS,
    gradient_tolerance=GRADIENTS,
    example={"...": 256, "H": 128},
    reference=rms_norm,
)
