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
        cos: (B or 1, S, R/2) float32, cosines of the angles; R ≤ D is the width that is rotated,
            the rest passes through. It has no gradient.
        sin: sines, likewise.
        interleaved: whether features 2i and 2i+1 are a pair, rather than i and i + R/2.

    Returns:
        q and k, rotated; shapes and dtypes as given.
    """
    return perform(CONTRACT, (q, k, cos, sin), (interleaved,))
