"""The public function `quantized_linear`."""

from typing import Literal

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.quantized_linear.contract import CONTRACT


def quantized_linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    bits: Literal[4, 8],
    group_size: int,
) -> Tensor:
    """Return ``x @ weight.T``, with the weight (N, K) packed as in `ms_kernels.packed_weights`.

    Args:
        x: (..., K).
        packed: (N, K · bits / 8) uint8.
        scales: (N, K / group_size), a floating dtype.
        zeros: (N, K / group_size), dtype of scales. None: ``2 ** (bits - 1)``.
        bits: 4 or 8.
        group_size: number of consecutive weights of a row that share a scale.

    Returns:
        (..., N), dtype of x. Only x has a gradient.
    """
    return perform(CONTRACT, (x, packed, scales, zeros), (bits, group_size))
