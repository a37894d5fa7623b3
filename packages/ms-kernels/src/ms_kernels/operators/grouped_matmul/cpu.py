"""Matrix product per expert, written directly into the result.

The counts are data-dependent, which torch.compile cannot trace, so this is one opaque operator.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ms_kernels.backends.cpu import on_cpu
from ms_kernels.core.plan import absent_grad, needs_grad
from ms_kernels.core.torch_operator import opaque
from ms_kernels.operators.grouped_matmul.contract import CONTRACT

MAX_CONVERTED_SIZE = 64
"""Smallest size of a product up to which converting it to float32 is faster than half precision."""


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
        # Experts without rows keep a gradient of 0.
        grad_weights = weights.new_zeros(weights.shape)
    for expert, rows in _groups(counts, x.shape[0]):
        if needs_grad(grad_mask, 0):
            _multiply(grad[rows], weights[expert].T, grad_x[rows])
        if needs_grad(grad_mask, 1):
            _multiply(x[rows].T, grad[rows], grad_weights[expert])
    return grad_x, grad_weights


def _multiply(x: Tensor, y: Tensor, result: Tensor) -> None:
    """Write the product to `result`, accumulated in float32."""
    if x.dtype.itemsize == 2 and min(x.shape) <= MAX_CONVERTED_SIZE:
        result.copy_(x.float() @ y.float())
    else:
        torch.mm(x, y, out=result)


def _groups(counts: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """Yield the experts that have rows, with their row slices."""
    sizes = counts.tolist()
    if sum(sizes) != rows or min(sizes) < 0:
        raise RuntimeError(f"counts sum to {sum(sizes)}, but x has {rows} rows")
    start = 0
    for expert, count in enumerate(sizes):
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
