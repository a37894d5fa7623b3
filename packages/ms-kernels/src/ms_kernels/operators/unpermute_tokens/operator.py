"""The public function `unpermute_tokens`."""

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.unpermute_tokens.contract import CONTRACT


def unpermute_tokens(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Lead rows back to their tokens: ``Σ_c weights[t, c] · rows[places[t, c]]``.

    Args:
        rows: (T·C, H).
        places: (T, C) int64 or int32, as `permute_tokens` gives them: each row once, which the CPU
            holds. On an accelerator a token with a place out of range is NaN, and of a row that no
            place or several name the gradient is not defined.
        weights: (T, C), a floating dtype; 1 if None.

    Returns:
        (T, H), dtype of rows.
    """
    return perform(CONTRACT, (rows, places, weights), ())
