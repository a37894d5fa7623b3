"""Attention through npu_fusion_attention in the layout BSND, which is ours.

A mask is True where a score is dropped. Plain causal and windowed calls pass one triangle of side
2,048 that stands for any size; documents need a mask of (B, 1, Sq, Sk) bytes. Queries are the
last of the keys' positions, so masks are anchored at the lower right. The gradient is torch_npu's.

Values of another width than keys get zeros, or keys do: `--mla-fa-without-pad` of others needs CANN
8.2. Sinks come in through the largest score and the sum that the operator keeps of each row; its
own gradient, given those of the row with its sink, is the one with sinks.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.backends.ascend import empty, on_npu
from ms_kernels.contracts.call import Call
from ms_kernels.operators.attention.contract import CONTRACT, MaskOptions, as_wide, visible

WIDEST = 768
MOST_HEADS = 256
LONGEST = 2**20

WHOLE_MASK, LOWER_RIGHT, BAND = 1, 3, 4
"""CANN's sparse modes: the mask is given whole; causal; between two diagonals."""
COMPRESSED = 2048
"""Side of the triangle that stands for a mask of any size."""


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
    queries, keys, values = q.shape[1], k.shape[1], v.shape[3]
    scale = settings.factor(q.shape[3])
    q, k, v = as_wide(q, k, v)
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
    masks = {
        "atten_mask": mask,
        "pre_tockens": before,
        "next_tockens": after,
        "sparse_mode": mode,
    }
    result: Tensor
    if sinks is None:
        result = _fused(q, k, v, scale, masks)[0]
    else:
        result = _WithSinks.apply(q, k, v, sinks, scale, masks)  # type: ignore[no-untyped-call]
    return result[..., :values]


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, masks: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Return the result, and of each row the largest score and the sum (B, Hq, Sq, 8 alike)."""
    made: tuple[Tensor, ...] = torch.ops.npu.npu_fusion_attention(
        q, k, v, q.shape[2], "BSND", scale=scale, **masks
    )
    return made[:3]


class _WithSinks(torch.autograd.Function):
    """The fused operator and its gradient, sinks put in between."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        scale: float,
        masks: dict[str, Any],
    ) -> Tensor:
        """Return (B, Sq, Hq, D)."""
        result, top, total = _fused(q, k, v, scale, masks)
        sinks = sinks.float().view(-1, 1, 1)
        higher = torch.maximum(top, sinks)
        kept = total * (top - higher).exp()
        total = kept + (sinks - higher).exp()
        share = (kept / total)[..., 0].transpose(1, 2)  # (B, Sq, Hq)
        result = (result * share.unsqueeze(-1)).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, result, higher, total)
        ctx.scale, ctx.masks = scale, masks
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and the sinks: a sink's is -Σ share · (grad · result)."""
        q, k, v, sinks, result, higher, total = ctx.saved_tensors
        grad = grad.contiguous()
        of_q, of_k, of_v = torch.ops.npu.npu_fusion_attention_grad(
            q,
            k,
            v,
            grad,
            q.shape[2],
            "BSND",
            softmax_max=higher,
            softmax_sum=total,
            attention_in=result,
            scale_value=ctx.scale,
            **ctx.masks,
        )[:3]
        of_sinks = None
        if ctx.needs_input_grad[3]:
            shares = ((sinks - higher).exp() / total)[..., 0]  # (B, Hq, Sq)
            slopes = (grad.float() * result.float()).sum(-1).transpose(1, 2)
            of_sinks = -(shares * slopes).sum((0, 2))
        return of_q, of_k, of_v, of_sinks, None, None


def _triangle(device: torch.device) -> Tensor:
    """Return a mask that is True above the diagonal; it is made once a device."""
    if torch.compiler.is_compiling() or torch._guards.detect_fake_mode() is not None:
        return _make_triangle(device)
    return _kept_triangle(device)


def _make_triangle(device: torch.device) -> Tensor:
    place = torch.arange(COMPRESSED, device=device)
    return place > place[:, None]


_kept_triangle = cache(_make_triangle)


def _refuses(call: Call) -> str | None:
    """Decline sizes beyond the fused kernel's."""
    q, k, v = call.present[:3]
    width = max(q.shape[3], v.shape[3])
    if width > WIDEST:
        return f"takes heads of at most {WIDEST}, not {width}"
    if q.shape[2] > MOST_HEADS:
        return f"takes at most {MOST_HEADS} heads, not {q.shape[2]}"
    if k.shape[1] > LONGEST:
        return f"takes at most {LONGEST} positions, not {k.shape[1]}"
    if call.compiling and call.tensors[4] is not None:
        return "torch.compile does not look into the gradient of sinks"
    return empty(call)


IMPLEMENTATION = on_npu(
    CONTRACT,
    attention,
    "npu_fusion_attention: never holds the scores, forward or backward",
    refuses=_refuses,
)
