"""Plain attention on CUDA by torch's own kernels: cuDNN's, else FlashAttention-2.

They are faster there than a Triton kernel, and what they do not take, which is windows, documents,
caches, sinks and values of another width, stays with ours. One that torch lacks is an error and is
never replaced by torch's plain path, which holds all scores.
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
    """Return ``softmax(q kᵀ · scale + mask) v`` with no mask but a causal one."""
    causal, _, scale = MaskOptions(*options)
    with sdpa_kernel(ORDER, set_priority=True):
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
    """Decline what these kernels do not take, or would take another way."""
    q, k, v, *others = call.present
    causal, window, _ = MaskOptions(*call.options)
    if others or window is not None:
        return "torch's own kernels take neither documents nor a window nor sinks"
    if v.shape[-1] != q.shape[-1]:
        return f"torch's own kernels take values as wide as keys, not {v.shape[-1]}"
    if causal and q.shape[1] != k.shape[1]:
        return "torch's own causal mask sets the first query beside the first key"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"torch's own kernels take heads of 8, 16 ... 256 features, not {q.shape[-1]}"
    for name, meta in zip("qkv", (q, k, v), strict=True):
        if 0 in meta.shape or meta.strides[-1] != 1:
            return f"torch's own kernels want numbers and a last stride of 1, and not {name}"
    return None


IMPLEMENTATION = Implementation(
    operator=CONTRACT.name,
    backend="sdpa",
    run=attention,
    devices=frozenset({"cuda"}),
    dtypes=(torch.bfloat16, torch.float16),
    refuses=_refuses,
    merit="cuDNN's kernel, else FlashAttention-2: faster than ours where no mask is asked for",
)
