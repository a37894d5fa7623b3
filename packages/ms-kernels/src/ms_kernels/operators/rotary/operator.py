"""The public function `rotary`."""

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.rotary.contract import CONTRACT


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions (arXiv 2104.09864).

    Args:
        q: (B, S, Hq, D).
        k: (B, S, Hk, D), dtype of q.
        cos: cosines of the angles (B or 1, S, R/2) float32, without gradient. The first R ≤ D
            features of a head are rotated, the others pass through.
        sin: sines of the angles, same shape and dtype.
        interleaved: rotate the pairs of features (2i, 2i + 1) instead of (i, i + R/2).

    Returns:
        Rotated q and k, with their shapes and dtypes.
    """
    return perform(CONTRACT, (q, k, cos, sin), (interleaved,))
