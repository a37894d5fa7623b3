"""Attention on the CPU through torch's fused kernel, which never materializes the scores.

The kernel needs keys and values of equal width, so the narrower one is zero-padded. Sinks are
added through the logsumexp L that the kernel returns per row: with a sink it becomes
log(e^L + e^sink), and the output is multiplied by sigmoid(L - sink). The kernel's backward, given
that logsumexp and that output, computes the gradient with sinks.
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
    """Return ``softmax(q kᵀ · scale + mask) v``, with sinks among the scores."""
    causal, window, _ = settings = MaskOptions(*options)
    queries, keys, width = q.shape[1], k.shape[1], v.shape[3]
    # torch's causal mask aligns the first query with the first key, so lengths must be equal.
    is_causal = causal and documents is None and window is None and queries == keys
    mask = None
    if not is_causal:
        mask = visible(queries, keys, q.device, documents, causal, window)
        mask = mask if mask is None else mask.unsqueeze(1)  # (B or 1, 1, Sq, Sk)
    scale = settings.factor(q.shape[3])
    q, k, v = (tensor.transpose(1, 2) for tensor in as_wide(q, k, v))  # (B, H, S, D)
    if sinks is None:
        grouped = q.shape[1] != k.shape[1]
        result = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    else:
        if mask is not None:
            # additive mask
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        result = _WithSinks.apply(q, k, v, sinks, mask, is_causal, scale)  # type: ignore[no-untyped-call]
    return result.transpose(1, 2)[..., :width]


class _WithSinks(torch.autograd.Function):
    """The fused kernel and its gradient with sinks; tensors are (B, H, S, D)."""

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
        """Return the output (B, Hq, Sq, D)."""
        result: Tensor
        result, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        sinks = sinks.to(lse.dtype)[:, None]  # (Hq, 1), broadcasts over (B, Hq, Sq)
        # exp(lse) / (exp(lse) + exp(sink)): renormalize the softmax to include the sink.
        result = (result * (lse - sinks).sigmoid().unsqueeze(-1)).to(q.dtype)
        # With the sink in lse, the fused backward gives the right gradients of q, k and v.
        ctx.save_for_backward(q, k, v, sinks, mask, result, torch.logaddexp(lse, sinks))
        ctx.causal, ctx.scale = causal, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and the sinks: dsink = -Σ p_sink · (grad · result)."""
        q, k, v, sinks, mask, result, lse = ctx.saved_tensors
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, result, lse, 0.0, ctx.causal, attn_mask=mask, scale=ctx.scale
        )
        dsinks = None
        if ctx.needs_input_grad[3]:
            delta = (grad.to(lse.dtype) * result).sum(-1)  # (B, Hq, Sq)
            dsinks = -((sinks - lse).exp() * delta).sum((0, 2))
        return dq, dk, dv, dsinks, None, None, None


def _refuses(call: Call) -> str | None:
    """Decline calls that torch would run on its math path, which rounds intermediate results."""
    for name, meta in zip("qkv", call.present, strict=False):
        if 0 in meta.shape:
            return f"torch's fused kernel does not support empty tensors, and {name} is empty"
        if meta.strides[-1] != 1:
            return f"torch's fused kernel needs a last stride of 1; {name} has {meta.strides[-1]}"
        if meta.dtype == torch.float64:
            return "float64 is for gradient checks, which use the reference"
    q, _, v = call.present[:3]
    # The kernel rounds ds = p · (do · v - delta) before it multiplies by k · scale. The error grows
    # as sqrt(Dv / D): at D=1, Dv=15 it reached 1.5 times the tolerance of q's gradient.
    if q.dtype in (torch.bfloat16, torch.float16) and v.shape[-1] > q.shape[-1]:
        return "rounds gradients too much in half precision for values wider than keys"
    if call.compiling and call.tensors[4] is not None:
        return "torch.compile cannot trace the gradient of sinks"
    return None


IMPLEMENTATION = on_cpu(
    CONTRACT,
    attention,
    "torch's fused kernel, which never materializes the scores",
    refuses=_refuses,
)
