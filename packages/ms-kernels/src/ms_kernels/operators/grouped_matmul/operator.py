"""The public function `grouped_matmul`."""

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.grouped_matmul.contract import CONTRACT


def grouped_matmul(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply each expert's consecutive rows by its matrix.

    Args:
        x: (T, K), sorted by expert.
        weights: (E, K, N), dtype of x.
        counts: rows per expert (E,) int64 or int32, possibly 0. They must sum to T; the CPU checks
            it. On an accelerator rows beyond the sum are NaN; on Ascend the last row is NaN if
            the sum is not T.

    Returns:
        (T, N), dtype of x.
    """
    return perform(CONTRACT, (x, weights, counts), ())
