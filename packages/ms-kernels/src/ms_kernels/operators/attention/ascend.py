"""Attention through npu_fusion_attention in the layout BSND, which is ours.

A mask is True where a score is dropped. Plain causal and windowed calls pass one triangle of side
2,048 that stands for any size; documents need a mask of (B, 1, Sq, Sk) bytes. Queries are the
last of the keys' positions, so masks are anchored at the lower right. The gradient is torch_npu's.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.ascend import empty, on_npu
from ms_kernels.contracts.call import Call
from ms_kernels.operators.attention.contract import CONTRACT, MaskOptions, visible

__all__ = ["IMPLEMENTATION"]

WIDEST = 768
MOST_HEADS = 256
LONGEST = 2**20

WHOLE_MASK, LOWER_RIGHT, BAND = 1, 3, 4
"""CANN's sparse modes: the mask is given whole; causal; between two diagonals."""
COMPRESSED = 2048
"""Side of the triangle that stands for a mask of any size."""


def attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, *options: Any) -> Tensor:
    """Return ``softmax(q kᵀ · scale + mask) v``."""
    causal, window, scale = MaskOptions(*options)
    queries, keys = q.shape[1], k.shape[1]
    mask, mode, before, after = None, 0, 2**31 - 1, 2**31 - 1
    if documents is not None:
        seen = visible(queries, keys, q.device, documents, causal, window)
        assert seen is not None
        mask, mode = ~seen.unsqueeze(1), WHOLE_MASK
    elif window is not None and window < keys:
        mask, mode = _triangle(q.device), BAND
        before, after = window - 1, 0 if causal else window - 1
    elif causal:
        mask, mode = _triangle(q.device), LOWER_RIGHT
    result: Tensor = torch.ops.npu.npu_fusion_attention(
        q,
        k,
        v,
        q.shape[2],
        "BSND",
        atten_mask=mask,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        pre_tockens=before,
        next_tockens=after,
        sparse_mode=mode,
    )[0]
    return result


def _triangle(device: torch.device) -> Tensor:
    """True above the diagonal; made once a device."""
    if torch.compiler.is_compiling() or torch._guards.detect_fake_mode() is not None:
        return _make_triangle(device)
    return _kept_triangle(device)


def _make_triangle(device: torch.device) -> Tensor:
    place = torch.arange(COMPRESSED, device=device)
    return place > place[:, None]


_kept_triangle = cache(_make_triangle)


def _refuses(call: Call) -> str | None:
    """Decline sizes beyond the fused kernel's."""
    q, k = call.given[:2]
    if q.shape[3] > WIDEST:
        return f"takes heads of at most {WIDEST}, not {q.shape[3]}"
    if q.shape[2] > MOST_HEADS:
        return f"takes at most {MOST_HEADS} heads, not {q.shape[2]}"
    if k.shape[1] > LONGEST:
        return f"takes at most {LONGEST} positions, not {k.shape[1]}"
    return empty(call)


IMPLEMENTATION = on_npu(
    CONTRACT,
    attention,
    "npu_fusion_attention: never holds the scores, forward or backward",
    refuses=_refuses,
)
