"""The public function `add_rms_norm`."""

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.add_rms_norm.contract import CONTRACT


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Add a residual and normalize the sum, like ``rms_norm(x + residual, weight, eps)``.

    Args:
        x: (..., H).
        residual: (..., H), dtype of x.
        weight: (H,), any floating dtype.
        eps: added to the mean square.

    Returns:
        The normalized sum and the sum itself, (..., H), dtype of x. The sum is rounded to that
        dtype before it is normalized.
    """
    return perform(CONTRACT, (x, residual, weight), (eps,))
