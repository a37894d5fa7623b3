"""AdamW in one pass: each tensor is read once and written once."""

from collections.abc import Sequence

from torch import Tensor

from ms_kernels.library import opaque
from ms_kernels.reference import CONTRACTS
from ms_kernels.triton import configuration
from ms_kernels.triton.launching import blocks, launch

__all__ = ["adamw_step"]


def _step(
    weights: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    step: int,
    learning_rate: float,
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
) -> None:
    place = configuration.place_of(weights)
    constants = configuration.fixed("adamw_step", "adamw_step", place)
    launch(
        "adamw_step.adamw_step",
        blocks(weights.numel(), constants["BLOCK"]),
        weights,
        *(weights, gradient, mean, square, weights.numel()),
        *(1 - betas[0], 1 - betas[1], 1 - learning_rate * weight_decay),
        *(learning_rate / (1 - betas[0] ** step), (1 - betas[1] ** step) ** -0.5, float(eps)),
        **constants,
    )


adamw_step = opaque(CONTRACTS["adamw_step"], "triton", forward=_step)
