"""Our attention in models of transformers, so that packed documents stay apart in all of them."""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ms_parallel.errors import ModelError
from ms_parallel.models.foreign.config import transformers
from ms_parallel.operators.protocol import Ops

__all__ = ["packed_calls", "registered"]

_NAME = "ms_parallel"
_packed = 0


def packed_calls() -> int:
    """How often attention was given documents so far."""
    return _packed


@cache
def registered(ops: Ops) -> str:
    """The name under which transformers finds attention by these operators.

    Blocks are given the documents of their rows (B, keys) int32 as `attention_mask`, or None.
    """

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Queries (B, heads, S, D) and the like to (B, S, heads, D)."""
        global _packed
        _packed += attention_mask is not None
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal:
            raise ModelError("attention of this model is not causal; it has no next token to learn")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        how: dict[str, Any] = {
            "documents": attention_mask,
            "window": sliding_window,
            "scale": scaling,
        }
        if softcap is None and s_aux is None:
            return ops.attention(q, k, v, **how), None
        return _attend_plainly(q, k, v, softcap=softcap, sinks=s_aux, **how), None

    name = f"{_NAME}.{getattr(ops, '__name__', type(ops).__name__)}"
    transformers().AttentionInterface.register(name, attend)
    return name


def _attend_plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    documents: Tensor | None,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention whose scores are capped, or share their softmax with a sink a head.

    Args:
        q: (B, Sq, Hq, D), the last of Sk positions.
        k: (B, Sk, Hk, D).
        v: like `k`.
        documents: (B, Sk) int32.
        window: keys at a distance below it are seen.
        scale: of the scores; 1/√D by default.
        softcap: scores become softcap · tanh(score / softcap).
        sinks: (Hq,), a logit of each head that takes part in the softmax and has no value.

    Returns:
        (B, Sq, Hq, D); scores in float32, float64 for float64.
    """
    groups, queries, keys = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    at = torch.arange(keys, device=q.device)
    distance = at[keys - queries :, None] - at
    seen = (distance >= 0)[None, None]
    if window is not None:
        seen = seen & (distance < window)
    if documents is not None:
        of_query = documents[:, None, keys - queries :, None]
        seen = seen & (of_query == documents[:, None, None, :])
    scores = scores.to(wide).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        extra = sinks.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, extra), -1)
    weights = scores.softmax(-1)[..., :keys].to(v.dtype)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)
