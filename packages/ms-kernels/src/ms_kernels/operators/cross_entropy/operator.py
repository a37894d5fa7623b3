"""The public function `cross_entropy`."""

from typing import Literal

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.cross_entropy.contract import CONTRACT


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Return ``-(1 - s) log p[target] - s mean(log p) + z log²Z``, where Z = Σ exp(logits).

    Args:
        logits: (..., V).
        targets: (...) int64 or int32, classes from 0 to V - 1, or `ignore_index`.
        ignore_index: target of rows that are excluded from the loss.
        label_smoothing: s, the weight of the uniform distribution over classes.
        z_loss: z, coefficient that keeps Z near 1 (arXiv 2204.02311).
        reduction: ``"mean"`` over the rows that are not ignored (0 if all are, where torch returns
            NaN, so that a rank without targets contributes nothing), ``"sum"``, or ``"none"``:
            (...), 0 for ignored rows.

    Returns:
        float32 (float64 for float64).
    """
    return perform(CONTRACT, (logits, targets), (ignore_index, label_smoothing, z_loss, reduction))
