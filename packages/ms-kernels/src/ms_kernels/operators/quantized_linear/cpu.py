"""Linear layer on packed weights, dequantized in tiles of rows and never as a full matrix."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.backends.cpu import on_cpu
from ms_kernels.contracts.call import accumulator
from ms_kernels.operators.quantized_linear.contract import CONTRACT, dequantize_weight

TILE_ELEMENTS = 2**18
"""Elements of a tile of the dequantized weight: 1 MiB in float32."""


class _QuantizedLinear(torch.autograd.Function):
    """``x @ weight.T`` with the dequantized weight, and its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, *form: int
    ) -> Tensor:
        ctx.save_for_backward(packed, scales, zeros)
        ctx.form, ctx.shape = form, x.shape
        flat = x.reshape(-1, x.shape[-1]).to(accumulator(x.dtype))
        result = x.new_empty(flat.shape[0], packed.shape[0])
        for rows, tile in _tiles(flat.dtype, packed, scales, zeros, *form):
            result[:, rows] = flat @ tile.T  # (T, K) @ (K, rows)
        return result.view(*x.shape[:-1], packed.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat = grad.reshape(-1, grad.shape[-1]).to(accumulator(grad.dtype))
        total = flat.new_zeros(flat.shape[0], ctx.shape[-1])
        for rows, tile in _tiles(flat.dtype, *ctx.saved_tensors, *ctx.form):
            total.addmm_(flat[:, rows], tile)
        return total.to(grad.dtype).view(ctx.shape), None, None, None, None, None


def _tiles(
    wide: torch.dtype, packed: Tensor, scales: Tensor, zeros: Tensor | None, *form: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield tiles of rows of the dequantized weight, in dtype `wide`."""
    # A row of the weight has packed.shape[1] * 8 / bits elements.
    step = max(TILE_ELEMENTS * form[0] // (8 * packed.shape[1]), 1)
    for start in range(0, len(packed), step):
        rows = slice(start, start + step)
        tile_zeros = None if zeros is None else zeros[rows]
        yield rows, dequantize_weight(wide, packed[rows], scales[rows], tile_zeros, *form)


IMPLEMENTATION = on_cpu(
    CONTRACT,
    _QuantizedLinear.apply,
    "dequantizes a few rows of the weight at a time, and saves it packed",
)
