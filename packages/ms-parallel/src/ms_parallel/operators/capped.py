"""Attention with tanh soft-capping of the scores, as in Gemma 2."""

import torch
from torch import Tensor

from ms_parallel.operators.cpu import widen
from ms_parallel.operators.losses import capped
from ms_parallel.operators.plain import visible_mask


def capped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softcap: float,
    documents: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute causal attention with soft-capped scores; materializes all scores.

    Args:
        q: (B, Sq, Hq, D).
        k: (B, Sk, Hk, D); Hk must divide Hq.
        v: Like `k`.
        softcap: Soft cap on the scores.
        documents: (B, Sk) int32; a query sees keys of its own document only.
        window: Sliding window in keys, the query's own position included.
        scale: Factor on the scores; 1/√D by default.

    Returns:
        (B, Sq, Hq, D).
    """
    # G query heads share one key head.
    grouped = q.view(*q.shape[:2], k.shape[2], -1, q.shape[3])  # (B, Sq, Hk, G, D)
    scores = torch.einsum("bqhgd,bkhd->bhgqk", grouped, k)
    scores = capped(widen(scores) * (q.shape[-1] ** -0.5 if scale is None else scale), softcap)
    visible = visible_mask(q.shape[1], k.shape[1], documents, window, q.device)
    # (B, Hk, G, Sq, Sk)
    weights = scores.masked_fill(~visible.unsqueeze(2), -torch.inf).softmax(-1).to(v.dtype)
    return torch.einsum("bhgqk,bkhd->bqhgd", weights, v).flatten(2, 3)
