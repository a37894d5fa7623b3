"""The public function `attention`."""

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.attention.contract import CONTRACT


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    documents: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend by scaled dot products, with grouped queries.

    Queries are the last Sq of the Sk positions, so a cache of keys and values needs no more than
    to be passed whole. Query head h reads key head ``h // (Hq / Hk)``.

    Args:
        q: (B, Sq, Hq, D), Sq ≤ Sk.
        k: (B, Sk, Hk, D), dtype of q; Hk divides Hq.
        v: (B, Sk, Hk, Dv), dtype of q; as wide as k or not, as in DeepSeek's latent attention.
        causal: whether a query sees no later position.
        documents: (B, Sk) int32 or int64; a query sees only positions of its own document.
        window: positions seen, counting the query's own: distances below `window`, to both sides
            if not causal.
        scale: factor of the scores, ``D ** -0.5`` if None.
        sinks: (Hq,), a score that each query of a head has beside those of its keys, and which
            takes its share of the softmax for nothing, as in gpt-oss.

    Returns:
        (B, Sq, Hq, Dv), dtype of q.
    """
    return perform(CONTRACT, (q, k, v, documents, sinks), (causal, window, scale))
