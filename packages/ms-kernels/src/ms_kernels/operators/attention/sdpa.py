"""Plain attention on CUDA through torch's SDPA kernels: cuDNN's, else FlashAttention-2.

They are faster than our Triton kernel, which remains in use for windows, documents, KV caches,
sinks and values of a different width. If torch has neither kernel, that is an error: its math
path, which materializes all scores, is never used.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ms_kernels.contracts.call import Call
from ms_kernels.core.choice import Implementation
from ms_kernels.operators.attention.contract import CONTRACT, MaskOptions

ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
"""Best first."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    *options: Any,
) -> Tensor:
    """Return ``softmax(q kᵀ · scale + mask) v``, with a causal mask or none."""
    causal, _, scale = MaskOptions(*options)
    with sdpa_kernel(ORDER, set_priority=True):
        # (B, S, H, D) -> (B, H, S, D), as views.
        result = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=causal,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return result.transpose(1, 2)


def _refuses(call: Call) -> str | None:
    """Decline calls that these kernels do not support, or whose mask they align differently."""
    q, k, v, *others = call.present
    causal, window, _ = MaskOptions(*call.options)
    if others or window is not None:
        return "torch's kernels do not support documents, a window or sinks"
    if v.shape[-1] != q.shape[-1]:
        return f"torch's kernels need values as wide as keys, not {v.shape[-1]}"
    if causal and q.shape[1] != k.shape[1]:
        return "torch's causal mask aligns the first query with the first key"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"torch's kernels support heads of 8, 16 ... 256 features, not {q.shape[-1]}"
    for name, meta in zip("qkv", (q, k, v), strict=True):
        if 0 in meta.shape or meta.strides[-1] != 1:
            return f"torch's kernels need {name} to be non-empty with a last stride of 1"
    return None


IMPLEMENTATION = Implementation(
    operator=CONTRACT.name,
    backend="sdpa",
    run=attention,
    devices=frozenset({"cuda"}),
    dtypes=(torch.bfloat16, torch.float16),
    refuses=_refuses,
    merit="cuDNN's kernel, else FlashAttention-2: faster than ours without documents or a window",
)
