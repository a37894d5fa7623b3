"""Layer normalisation (Ba, Kiros and Hinton, 2016)."""

import torch
from torch import Tensor

from ms_kernels.contract import FLOATING, Argument, Contract, Dims, Work, accumulator
from ms_kernels.reference.options import eps_option
from ms_kernels.reference.tolerance import GRADIENTS, RESULTS

__all__ = ["CONTRACT", "layer_norm"]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return ``(x - mean) / sqrt(variance + eps) · weight + bias``, rounded once, to x's dtype."""
    wide = x.to(accumulator(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    result = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
    return (result if bias is None else result + bias).to(x.dtype)


def _forward(dims: Dims, itemsize: int) -> Work:
    elements = dims["..."] * dims["H"]
    return Work((2 * elements + 2 * dims["H"]) * itemsize, 7 * elements)


def _backward(dims: Dims, itemsize: int) -> Work:
    elements = dims["..."] * dims["H"]
    return Work((3 * elements + 3 * dims["H"]) * itemsize, 13 * elements)


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
    forward=_forward,
    backward=_backward,
    tolerance=RESULTS,
    gradient_tolerance=GRADIENTS,
    example={"...": 256, "H": 128},
    reference=layer_norm,
)
