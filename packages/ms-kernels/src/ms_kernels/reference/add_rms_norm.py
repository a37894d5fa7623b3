"""A residual sum and its root mean square normalisation, in one pass over memory."""

import torch
from torch import Tensor

from ms_kernels.contract import FLOATING, Argument, Contract, Dims, Work
from ms_kernels.reference.options import eps_option
from ms_kernels.reference.rms_norm import rms_norm
from ms_kernels.reference.tolerance import RESULTS, SUMMED_GRADIENTS

__all__ = ["CONTRACT", "add_rms_norm"]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return ``rms_norm(x + residual)`` and the sum, rounded before it is normalised.

    So it equals the two steps bit for bit, and the sum is all that a backward pass needs.
    """
    summed = torch.add(x, residual)
    return rms_norm(summed, weight, eps), summed


def _forward(dims: Dims, itemsize: int) -> Work:
    elements = dims["..."] * dims["H"]
    return Work((4 * elements + dims["H"]) * itemsize, 5 * elements)


def _backward(dims: Dims, itemsize: int) -> Work:
    """The gradients of x and residual are one tensor."""
    elements = dims["..."] * dims["H"]
    return Work((4 * elements + 2 * dims["H"]) * itemsize, 11 * elements)


CONTRACT = Contract(
    name="add_rms_norm",
    summary="s = x + residual, and s / sqrt(mean(s²) + eps) · weight",
    arguments=(
        Argument(name="x", dims="... H"),
        Argument(name="residual", dims="... H", like="x"),
        Argument(name="weight", dims="H", dtypes=FLOATING),
    ),
    options=(eps_option(1e-6),),
    returns="two tensors (... H), dtype of x: normalised, and the sum",
    results={"normed": "... H", "summed": "... H"},
    splits=("...",),
    positive="H",
    forward=_forward,
    backward=_backward,
    tolerance=RESULTS,
    gradient_tolerance=SUMMED_GRADIENTS,
    example={"...": 256, "H": 128},
    reference=add_rms_norm,
)
