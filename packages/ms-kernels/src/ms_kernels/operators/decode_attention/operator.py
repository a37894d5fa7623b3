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
    """Attend from one new position a sequence to all its positions, kept in pages.

    Position p of sequence b stands in page ``page_table[b, p // page]`` at place ``p % page``, the
    new one, ``lengths[b] - 1``, included. It has no gradient.

    Args:
        q: (B, Hq, D).
        key_pages: (P, page, Hk, D), dtype of q; Hk divides Hq.
        value_pages: likewise.
        page_table: (B, N) int32. Entries of pages that lie past a sequence's end, or wholly before
            its window, are not read.
        lengths: (B,) int32, positions of each sequence, from 0 to N · page.
        window: positions seen, the newest ones; all if None.
        scale: factor of the scores, ``D ** -0.5`` if None.

    Returns:
        (B, Hq, D), dtype of q; 0 for a sequence of length 0. A length or a page in use that is out
        of range raises on the CPU; on an accelerator nothing is read for it, and the sequence's
        result is NaN.
    """
    return perform(CONTRACT, (q, key_pages, value_pages, page_table, lengths), (window, scale))
