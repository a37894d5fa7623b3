"""The public function `rms_norm`."""

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.rms_norm.contract import CONTRACT


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalize by the root mean square over the last dim (arXiv 1910.07467).

    Args:
        x: (..., H).
        weight: (H,), any floating dtype.
        eps: added to the mean square.

    Returns:
        ``x / sqrt(mean(x²) + eps) · weight``, (..., H), dtype of x.
    """
    return perform(CONTRACT, (x, weight), (eps,))
