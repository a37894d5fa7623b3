"""The public function `unpermute_tokens`."""

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.unpermute_tokens.contract import CONTRACT


def unpermute_tokens(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum expert rows back to their tokens: ``Σ_c weights[t, c] · rows[places[t, c]]``.

    Args:
        rows: (T·C, H).
        places: row of each choice (T, C) int64 or int32, from `permute_tokens`: each row exactly
            once, which the CPU checks. On an accelerator a token with an out-of-range row is NaN,
            and gradients of rows that occur never or repeatedly are undefined.
        weights: (T, C), a floating dtype. None: 1.

    Returns:
        (T, H), dtype of rows.
    """
    return perform(CONTRACT, (rows, places, weights), ())
