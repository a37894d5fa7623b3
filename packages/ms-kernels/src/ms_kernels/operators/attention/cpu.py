"""Attention through torch's fused kernel, which never holds the scores."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ms_kernels.backends.cpu import on_cpu
from ms_kernels.contracts.call import Call
from ms_kernels.operators.attention.contract import CONTRACT, MaskOptions, visible

__all__ = ["IMPLEMENTATION"]


def attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, *options: Any) -> Tensor:
    """Return ``softmax(q kᵀ · scale + mask) v``."""
    causal, window, scale = MaskOptions(*options)
    queries, keys = q.shape[1], k.shape[1]
    # torch's causal mask sets the first query beside the first key: ours needs equal lengths.
    simple = causal and documents is None and window is None and queries == keys
    mask = None
    if not simple:
        mask = visible(queries, keys, q.device, documents, causal, window)
        mask = mask if mask is None else mask.unsqueeze(1)  # (B or 1, 1, Sq, Sk)
    result = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=simple,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return result.transpose(1, 2)


def _refuses(call: Call) -> str | None:
    """Decline what the fused kernel would hand to torch's plain path, which rounds in between."""
    for name, meta in zip("qkv", call.given, strict=False):
        if 0 in meta.shape:
            return f"torch's fused kernel takes no empty tensor, and {name} is one"
        if meta.strides[-1] != 1:
            return f"torch's fused kernel wants a last stride of 1; {name} has {meta.strides[-1]}"
        if meta.dtype == torch.float64:
            return "float64 is for gradient checks, which the reference answers"
    return None


IMPLEMENTATION = on_cpu(
    CONTRACT,
    attention,
    "torch's fused kernel, which never holds the scores",
    refuses=_refuses,
)
