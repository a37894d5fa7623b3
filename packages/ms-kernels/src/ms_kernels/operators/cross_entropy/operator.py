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
        ignore_index: the target of a row that does not count.
        label_smoothing: s, the share of the target's weight that is spread over all classes.
        z_loss: z, which keeps Z near 1 (arXiv 2204.02311).
        reduction: ``"mean"`` over the rows that count (0 when none does, where torch's is NaN:
            so a rank without targets adds nothing), ``"sum"``, or ``"none"``: (...), 0 for a row
            that does not count.

    Returns:
        float32 (float64 for float64).
    """
    return perform(CONTRACT, (logits, targets), (ignore_index, label_smoothing, z_loss, reduction))
