"""The public function `layer_norm`."""

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.layer_norm.contract import CONTRACT


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalize by mean and variance over the last dim (arXiv 1607.06450).

    Args:
        x: (..., H).
        weight: (H,), any floating dtype.
        bias: (H,), dtype of weight. None: no bias.
        eps: added to the variance.

    Returns:
        ``(x - mean) / sqrt(variance + eps) · weight + bias``, (..., H), dtype of x.
    """
    return perform(CONTRACT, (x, weight, bias), (eps,))
