"""Linear cross-entropy over the rows that count alone, found before any work is done.

Where prompts are ignored, as in fine-tuning, most rows may be; they cost nothing then. An
accelerator would have to wait for their number, the CPU need not.
"""

from torch import Tensor

from ms_kernels.contract import accumulator
from ms_kernels.reference.linear_cross_entropy import linear_cross_entropy as every_row

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Return what `cross_entropy` of ``hidden @ weight.T`` returns."""
    options = (ignore_index, label_smoothing, z_loss, reduction)
    flat = targets.reshape(-1)
    rows = (flat != ignore_index).nonzero().squeeze(-1)
    # The copy of hidden must be worth it: leave out at least one row in sixteen.
    if len(rows) > flat.numel() - flat.numel() // 16:
        return every_row(hidden, weight, targets, *options)
    losses = every_row(
        hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows), weight, flat[rows], *options
    )
    if reduction != "none":
        return losses
    spread = hidden.new_zeros(flat.shape, dtype=accumulator(hidden.dtype))
    return spread.index_copy(0, rows, losses).view(targets.shape)
