"""The public function `attention`."""

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.attention.contract import CONTRACT

__all__ = ["attention"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    documents: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend by scaled dot products, with grouped queries.

    Queries are the last Sq of the Sk positions, so a cache of keys and values needs no more than
    to be passed whole. Query head h reads key head ``h // (Hq / Hk)``.

    Args:
        q: (B, Sq, Hq, D), Sq ≤ Sk.
        k: (B, Sk, Hk, D), dtype of q; Hk divides Hq.
        v: (B, Sk, Hk, D), dtype of q.
        causal: whether a query sees no later position.
        documents: (B, Sk) int32 or int64; a query sees only positions of its own document.
        window: positions seen, counting the query's own: distances below `window`, to both sides
            if not causal.
        scale: factor of the scores, ``D ** -0.5`` if None.

    Returns:
        (B, Sq, Hq, D), dtype of q.
    """
    return perform(CONTRACT, (q, k, v, documents), (causal, window, scale))
