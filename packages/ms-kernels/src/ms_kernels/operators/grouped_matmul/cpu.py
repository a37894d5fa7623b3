"""A matrix product for each expert, written straight into the result.

The counts are data, which torch.compile cannot follow; so it is opaque to it, one operator.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ms_kernels.backends.cpu import on_cpu
from ms_kernels.core.plan import absent_grad, needs_grad
from ms_kernels.core.torch_operator import opaque
from ms_kernels.operators.grouped_matmul.contract import CONTRACT

FEW = 64
"""Rows up to which it takes longer to start a half-precision product than to widen its factors."""


def _forward(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    result = x.new_empty(x.shape[0], weights.shape[-1])
    for expert, rows in _groups(counts, x.shape[0]):
        _multiply(x[rows], weights[expert], result[rows])
    return result


def _backward(
    grad: Tensor, x: Tensor, weights: Tensor, counts: Tensor, grad_mask: int
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weights = absent_grad(x), absent_grad(weights)
    if needs_grad(grad_mask, 0):
        grad_x = x.new_empty(x.shape)
    if needs_grad(grad_mask, 1):
        grad_weights = weights.new_zeros(weights.shape)
    for expert, rows in _groups(counts, x.shape[0]):
        if needs_grad(grad_mask, 0):
            _multiply(grad[rows], weights[expert].T, grad_x[rows])
        if needs_grad(grad_mask, 1):
            _multiply(x[rows].T, grad[rows], grad_weights[expert])
    return grad_x, grad_weights


def _multiply(left: Tensor, right: Tensor, result: Tensor) -> None:
    """Put a product into `result`, summed in float32."""
    if left.dtype.itemsize == 2 and min(left.shape) <= FEW:
        result.copy_(left.float() @ right.float())
    else:
        torch.mm(left, right, out=result)


def _groups(counts: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and which."""
    each = counts.tolist()
    if sum(each) != rows or min(each) < 0:
        raise RuntimeError(f"counts of {sum(each)} rows in sum, for {rows}")
    start = 0
    for expert, count in enumerate(each):
        if count:
            yield expert, slice(start, start + count)
        start += count


IMPLEMENTATION = on_cpu(
    CONTRACT,
    opaque(
        CONTRACT,
        "cpu",
        forward=_forward,
        backward=_backward,
        saves=("x", "weights", "counts"),
    ),
    "writes into the result, skips experts without rows, one operator to torch.compile",
    refuses=lambda call: None,
    pays_from=0,
)
