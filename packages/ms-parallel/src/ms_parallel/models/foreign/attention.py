"""Our attention in models of transformers, so that packed documents stay apart in all of them."""

import math
from collections.abc import Hashable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from ms_parallel.errors import ModelError
from ms_parallel.models.foreign.config import transformers
from ms_parallel.operators.protocol import Ops

__all__ = ["calls", "registered"]

_NAME = "ms_parallel"
_calls = 0


def calls() -> int:
    """How often attention was asked for so far."""
    return _calls


@cache
def registered(ops: Hashable) -> str:
    """The name under which transformers finds attention by these operators.

    Blocks are given the documents of their rows (B, keys) int32 as `attention_mask`, or None.
    """

    attention = cast(Ops, ops).attention

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
        global _calls
        _calls += 1
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal:
            raise ModelError("attention of this model is not causal; it has no next token to learn")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        how: dict[str, Any] = {
            "documents": attention_mask,
            "window": sliding_window,
            "scale": scaling,
        }
        if softcap is None:
            sinks = {} if s_aux is None else {"sinks": s_aux}
            return attention(q, k, v, **how, **sinks), None
        if s_aux is not None:
            raise ModelError("attention with capped scores and sinks is not known here")
        return _capped(q, k, v, softcap=softcap, **how), None

    name = f"{_NAME}.{getattr(ops, '__name__', type(ops).__name__)}"
    transformers().AttentionInterface.register(name, attend)
    return name


def _capped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    documents: Tensor | None,
    window: int | None,
    scale: float | None,
    softcap: float,
) -> Tensor:
    """Causal attention whose scores are capped.

    Args:
        q: (B, Sq, Hq, D), the last of Sk positions.
        k: (B, Sk, Hk, D).
        v: like `k`.
        documents: (B, Sk) int32.
        window: keys at a distance below it are seen.
        scale: of the scores; 1/√D by default.
        softcap: scores become softcap · tanh(score / softcap).

    Returns:
        (B, Sq, Hq, D); scores in float32, float64 for float64.
    """
    groups, queries, keys = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
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
    weights = scores.softmax(-1).to(v.dtype)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)
