"""In-place AdamW step (Loshchilov and Hutter, 2019), equivalent to `torch.optim.AdamW`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Option, Work
from ms_kernels.contracts.call import ACCUMULATED, FLOATING, Dims
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.overlaps import check_overlaps
from ms_kernels.contracts.values import is_integer, is_number


def adamw_step(
    weights: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    step: int = 1,
    learning_rate: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """Update weights and moments in place, computed in the moments' dtype and rounded once."""
    wide = mean.dtype
    wide_grad = gradient.detach().to(wide)
    with torch.no_grad():
        mean.lerp_(wide_grad, 1 - betas[0])
        square.mul_(betas[1]).addcmul_(wide_grad, wide_grad, value=1 - betas[1])
        denominator = (square.sqrt() / (1 - betas[1] ** step) ** 0.5).add_(eps)  # √v̂ + eps
        # decoupled weight decay
        new_weights = weights.to(wide) * (1 - learning_rate * weight_decay)
        new_weights.addcdiv_(mean, denominator, value=-learning_rate / (1 - betas[0] ** step))
        weights.copy_(new_weights)


def _forward(dims: Dims, itemsize: int) -> Work:
    """Read weights, gradient and two float32 moments; write weights and moments."""
    return Work(dims["..."] * (3 * itemsize + 16), 14 * dims["..."])


def _squares(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _number(name: str, default: float, trials: tuple[float, ...] = ()) -> Option:
    return Option(
        name=name,
        default=default,
        holds=lambda value: is_number(value, 0),
        fits="a number, 0 or more, finite in float32",
        trials=trials,
        changing=name == "learning_rate",
    )


def _check_values(*args: Any) -> None:
    """Reject tensors that share memory."""
    check_overlaps(CONTRACT, args[:4])


CONTRACT: Contract = Contract(
    name="adamw_step",
    summary="one step of AdamW, in place",
    arguments=(
        Argument(name="weights", dims="...", differentiable=False, mutated=True),
        Argument(name="gradient", dims="...", dtypes=FLOATING, differentiable=False),
        Argument(name="mean", dims="...", dtypes=ACCUMULATED, differentiable=False, mutated=True),
        Argument(
            name="square",
            dims="...",
            dtypes=ACCUMULATED,
            like="mean",
            differentiable=False,
            mutated=True,
            draw=_squares,
        ),
    ),
    options=(
        Option(
            name="step",
            default=1,
            holds=lambda value: is_integer(value, 1),
            fits="an integer of at least 1",
            trials=(1000,),
            changing=True,
        ),
        _number("learning_rate", 1e-3, (0.1,)),
        Option(
            name="betas",
            default=(0.9, 0.999),
            kind=Sequence[float],
            holds=lambda value: (
                isinstance(value, tuple)
                and len(value) == 2
                and all(is_number(beta, 0, below=1) for beta in value)
            ),
            fits="a tuple of two numbers, each at least 0 and below 1",
            trials=((0.5, 0.95), (0.0, 0.0)),
        ),
        _number("eps", 1e-8, (1e-3,)),
        _number("weight_decay", 0.01, (0.0, 0.5)),
    ),
    returns="None: weights, mean and square are updated in place",
    positive="",
    check_values=_check_values,
    forward=_forward,
    example={"...": 1000},
    reference=adamw_step,
    ladders=(Ladder({"...": 1024}, ("...",)),),
)
