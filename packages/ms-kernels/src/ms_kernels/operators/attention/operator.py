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
    """Scaled dot-product attention with grouped queries.

    Queries are the last Sq of the Sk positions, so a KV cache is passed as k and v without further
    arguments. Query head h attends to key head ``h // (Hq / Hk)``.

    Args:
        q: queries (B, Sq, Hq, D), Sq ≤ Sk.
        k: keys (B, Sk, Hk, D), dtype of q; Hk divides Hq.
        v: values (B, Sk, Hk, Dv), dtype of q; Dv may differ from D, as in DeepSeek's MLA.
        causal: mask later positions.
        documents: document of each position, (B, Sk) int32 or int64. A query sees only positions
            of its own document.
        window: sliding window size: a query sees positions at a distance below `window`, on both
            sides if not causal. None: no window.
        scale: factor applied to the scores. None: ``D ** -0.5``.
        sinks: attention sink logits (Hq,), as in gpt-oss: an extra score per head in the softmax
            with a value of zero.

    Returns:
        (B, Sq, Hq, Dv), dtype of q.
    """
    return perform(CONTRACT, (q, k, v, documents, sinks), (causal, window, scale))
