"""A residual sum and its RMSNorm in one pass over memory per direction, using RMSNorm's kernels."""

from collections.abc import Iterator

from torch import Tensor

from ms_kernels.backends.triton.configuration import norm_kernels
from ms_kernels.backends.triton.implementation import narrow_rows, on_gpu
from ms_kernels.backends.triton.rows import needed_grads
from ms_kernels.core.entries import Entry
from ms_kernels.operators.add_rms_norm.contract import CONTRACT
from ms_kernels.operators.rms_norm.triton import KERNELS, differentiate, norm_entries, normalize

FORWARD, BACKWARD = TUNED = norm_kernels("add_rms_norm", "rms_norm")


def _forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return normalize(FORWARD, x, residual, weight, eps)


def _backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    summed: Tensor,
    weight: Tensor,
    scale: Tensor,
    grad_mask: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_weight = differentiate(BACKWARD, grad, grad_sum, summed, weight, scale)
    # Results of a torch operator must not alias: clone the second if both gradients are needed.
    both = grad_mask & 3 == 3
    return needed_grads(grad_mask, (grad_x, grad_x.clone() if both else grad_x, grad_weight))


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time library."""
    flag = {"ADD": True}
    yield from norm_entries(TUNED, KERNELS, chip, dtype, detail="add_", flags=(flag, flag))


IMPLEMENTATION = on_gpu(
    CONTRACT,
    "adds and normalizes in one pass; saves the sum and one value per row",
    tuned=TUNED,
    entries=entries,
    refuses=narrow_rows,
    forward=_forward,
    intermediates={"scale": "..."},
    backward=_backward,
    saves=("summed", "weight", "scale"),
)
