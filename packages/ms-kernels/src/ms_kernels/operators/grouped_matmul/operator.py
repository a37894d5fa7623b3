"""The public function `grouped_matmul`."""

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.grouped_matmul.contract import CONTRACT


def grouped_matmul(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply consecutive rows by their expert's matrix.

    Args:
        x: (T, K), the rows of expert 0 first.
        weights: (E, K, N), dtype of x.
        counts: (E,) int64 or int32, how many rows each expert has, 0 allowed; their sum is T, which
            the CPU holds. In kernels on an accelerator a row beyond their sum is NaN; on Ascend
            the last row is, where the sum (of counts of at least 0) is not T.

    Returns:
        (T, N), dtype of x.
    """
    return perform(CONTRACT, (x, weights, counts), ())
