"""AdamW in one pass: each tensor is read once and written once."""

from collections.abc import Sequence

from torch import Tensor

from ms_kernels.library import opaque
from ms_kernels.reference import CONTRACTS
from ms_kernels.triton.launching import blocks, launch

__all__ = ["adamw_step"]

BLOCK = 1024


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
    launch(
        "adamw_step.adamw_step",
        blocks(weights.numel(), BLOCK),
        weights,
        *(weights, gradient, mean, square, weights.numel()),
        *(1 - betas[0], 1 - betas[1], 1 - learning_rate * weight_decay),
        *(learning_rate / (1 - betas[0] ** step), (1 - betas[1] ** step) ** -0.5, float(eps)),
        BLOCK=BLOCK,
        num_warps=4,
    )


adamw_step = opaque(CONTRACTS["adamw_step"], "triton", forward=_step)
