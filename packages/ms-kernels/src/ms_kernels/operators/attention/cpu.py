"""Attention through torch's fused kernel, which never holds the scores.

It wants values as wide as keys: whichever is narrower gets zeros, which change nothing. Sinks come
in through what the kernel keeps of each row, L, the log of the sum of its exponentials: with a sink
it is log(e^L + e^sink), and the result that without it times sigmoid(L - sink). The kernel's own
gradient, given that log and that result, is then the one with sinks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.backends.cpu import on_cpu
from ms_kernels.contracts.call import Call
from ms_kernels.operators.attention.contract import CONTRACT, MaskOptions, as_wide, visible


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    *options: Any,
) -> Tensor:
    """Return ``softmax(q kᵀ · scale + mask) v``, sinks among the scores."""
    causal, window, _ = settings = MaskOptions(*options)
    queries, keys, width = q.shape[1], k.shape[1], v.shape[3]
    # torch's causal mask sets the first query beside the first key: ours needs equal lengths.
    simple = causal and documents is None and window is None and queries == keys
    mask = None
    if not simple:
        mask = visible(queries, keys, q.device, documents, causal, window)
        mask = mask if mask is None else mask.unsqueeze(1)  # (B or 1, 1, Sq, Sk)
    scale = settings.factor(q.shape[3])
    q, k, v = (each.transpose(1, 2) for each in as_wide(q, k, v))
    if sinks is None:
        grouped = q.shape[1] != k.shape[1]
        result = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=simple, scale=scale, enable_gqa=grouped
        )
    else:
        if mask is not None:
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        result = _WithSinks.apply(q, k, v, sinks, mask, simple, scale)  # type: ignore[no-untyped-call]
    return result.transpose(1, 2)[..., :width]


class _WithSinks(torch.autograd.Function):
    """The fused kernel and its gradient, sinks put in between; heads stand before positions."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        """Return (B, Hq, Sq, D)."""
        result: Tensor
        result, kept = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        sinks = sinks.to(kept.dtype)[:, None]
        result = (result * (kept - sinks).sigmoid().unsqueeze(-1)).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, mask, result, torch.logaddexp(kept, sinks))
        ctx.causal, ctx.scale = causal, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and the sinks: a sink's is -Σ share · (grad · result)."""
        q, k, v, sinks, mask, result, kept = ctx.saved_tensors
        of_q, of_k, of_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, result, kept, 0.0, ctx.causal, attn_mask=mask, scale=ctx.scale
        )
        of_sinks = None
        if ctx.needs_input_grad[3]:
            slopes = (grad.to(kept.dtype) * result).sum(-1)
            of_sinks = -((sinks - kept).exp() * slopes).sum((0, 2))
        return of_q, of_k, of_v, of_sinks, None, None, None


def _refuses(call: Call) -> str | None:
    """Decline what the fused kernel would hand to torch's plain path, which rounds in between."""
    for name, meta in zip("qkv", call.present, strict=False):
        if 0 in meta.shape:
            return f"torch's fused kernel takes no empty tensor, and {name} is one"
        if meta.strides[-1] != 1:
            return f"torch's fused kernel wants a last stride of 1; {name} has {meta.strides[-1]}"
        if meta.dtype == torch.float64:
            return "float64 is for gradient checks, which the reference answers"
    if call.compiling and call.tensors[4] is not None:
        return "torch.compile does not look into the gradient of sinks"
    return None


IMPLEMENTATION = on_cpu(
    CONTRACT,
    attention,
    "torch's fused kernel, which never holds the scores",
    refuses=_refuses,
)
