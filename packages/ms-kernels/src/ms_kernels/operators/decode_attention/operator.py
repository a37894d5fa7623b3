"""The public function `decode_attention`."""

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.decode_attention.contract import CONTRACT


def decode_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Paged attention for decoding: one query per sequence over its keys and values in pages.

    Position p of sequence b is slot ``p % page`` of page ``page_table[b, p // page]``, including
    the new position ``lengths[b] - 1``. Not differentiable.

    Args:
        q: (B, Hq, D).
        key_pages: (P, page, Hk, D), dtype of q; Hk divides Hq.
        value_pages: (P, page, Hk, D), dtype of q.
        page_table: (B, N) int32. Entries past a sequence's end, or entirely before its window, are
            not read.
        lengths: sequence lengths (B,) int32, from 0 to N · page.
        window: number of most recent positions to attend to. None: all.
        scale: factor applied to the scores. None: ``D ** -0.5``.

    Returns:
        (B, Hq, D), dtype of q; 0 for a sequence of length 0. An out-of-range length or page raises
        on the CPU; on an accelerator it is not read and makes the sequence's result NaN.
    """
    return perform(CONTRACT, (q, key_pages, value_pages, page_table, lengths), (window, scale))
