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
    """Return ``x @ weight.T``, the weight (N, K) packed as `ms_kernels.packed_weights` says.

    Args:
        x: (..., K).
        packed: (N, K · bits / 8) uint8.
        scales: (N, K / group_size), a floating dtype.
        zeros: likewise, dtype of scales; ``2 ** (bits - 1)`` if None.
        bits: 4 or 8.
        group_size: how many weights of a row share a scale.

    Returns:
        (..., N), dtype of x. It has a gradient with respect to x alone.
    """
    return perform(CONTRACT, (x, packed, scales, zeros), (bits, group_size))
