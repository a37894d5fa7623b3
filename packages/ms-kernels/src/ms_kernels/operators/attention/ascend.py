"""Attention on Ascend through npu_fusion_attention, in layout BSND.

Masks are True where a score is dropped. Causal and windowed calls pass one 2,048 x 2,048 triangle
that CANN applies to any size; documents need a full (B, 1, Sq, Sk) mask. Queries are the last of
the keys' positions, so masks are anchored at the lower right. The gradient is torch_npu's.

Keys or values are zero-padded to a common width; unequal widths without padding need CANN 8.2.
Sinks are added through the row maximum and row sum that the operator returns; its backward, given
the maximum and sum that include the sink, computes the gradient with sinks.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.backends.ascend import empty, on_npu
from ms_kernels.contracts.call import Call
from ms_kernels.operators.attention.contract import CONTRACT, MaskOptions, as_wide, visible

MAX_WIDTH = 768
MAX_HEADS = 256
MAX_POSITIONS = 2**20

WHOLE_MASK, LOWER_RIGHT, BAND = 1, 3, 4
"""CANN's sparse modes: full mask; causal; band between two diagonals."""
COMPRESSED = 2048
"""Side of the compressed mask that CANN expands to any size."""


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
    queries, keys, values = q.shape[1], k.shape[1], v.shape[3]
    scale = settings.factor(q.shape[3])
    q, k, v = as_wide(q, k, v)
    # Mode 0 without a mask; the limits mean no band.
    mask, mode, before, after = None, 0, 2**31 - 1, 2**31 - 1
    if documents is not None:
        visible_keys = visible(queries, keys, q.device, documents, causal, window)
        assert visible_keys is not None
        mask, mode = ~visible_keys.unsqueeze(1), WHOLE_MASK
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
    """Return the output, and per row the maximum and the sum, (B, Hq, Sq, 8) of equal numbers."""
    outputs: tuple[Tensor, ...] = torch.ops.npu.npu_fusion_attention(
        q, k, v, q.shape[2], "BSND", scale=scale, **masks
    )
    return outputs[:3]


class _WithSinks(torch.autograd.Function):
    """The fused operator and its gradient with sinks."""

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
        """Return the output (B, Sq, Hq, D)."""
        result, row_max, row_sum = _fused(q, k, v, scale, masks)
        # As one more score: rescale to the larger maximum, and add e^(sink - max) to the sum.
        sinks = sinks.float().view(-1, 1, 1)
        new_max = torch.maximum(row_max, sinks)
        rescaled = row_sum * (row_max - new_max).exp()
        new_sum = rescaled + (sinks - new_max).exp()
        keys_share = (rescaled / new_sum)[..., 0].transpose(1, 2)  # (B, Sq, Hq)
        result = (result * keys_share.unsqueeze(-1)).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, result, new_max, new_sum)
        ctx.scale, ctx.masks = scale, masks
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and the sinks: dsink = -Σ p_sink · (grad · result)."""
        q, k, v, sinks, result, row_max, row_sum = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = torch.ops.npu.npu_fusion_attention_grad(
            q,
            k,
            v,
            grad,
            q.shape[2],
            "BSND",
            softmax_max=row_max,
            softmax_sum=row_sum,
            attention_in=result,
            scale_value=ctx.scale,
            **ctx.masks,
        )[:3]
        dsinks = None
        if ctx.needs_input_grad[3]:
            p_sink = ((sinks - row_max).exp() / row_sum)[..., 0]  # (B, Hq, Sq)
            delta = (grad.float() * result.float()).sum(-1).transpose(1, 2)
            dsinks = -(p_sink * delta).sum((0, 2))
        return dq, dk, dv, dsinks, None, None


def _triangle(device: torch.device) -> Tensor:
    """Return the mask that is True above the diagonal, cached per device."""
    if torch.compiler.is_compiling() or torch._guards.detect_fake_mode() is not None:
        return _make_triangle(device)
    return _cached_triangle(device)


def _make_triangle(device: torch.device) -> Tensor:
    position = torch.arange(COMPRESSED, device=device)
    return position > position[:, None]


_cached_triangle = cache(_make_triangle)


def _refuses(call: Call) -> str | None:
    """Decline sizes beyond the limits of the fused operator."""
    q, k, v = call.present[:3]
    width = max(q.shape[3], v.shape[3])
    if width > MAX_WIDTH:
        return f"supports heads of at most {MAX_WIDTH} features, not {width}"
    if q.shape[2] > MAX_HEADS:
        return f"supports at most {MAX_HEADS} heads, not {q.shape[2]}"
    if k.shape[1] > MAX_POSITIONS:
        return f"supports at most {MAX_POSITIONS} positions, not {k.shape[1]}"
    if call.compiling and call.tensors[4] is not None:
        return "torch.compile cannot trace the gradient of sinks"
    return empty(call)


IMPLEMENTATION = on_npu(
    CONTRACT,
    attention,
    "npu_fusion_attention: never materializes the scores, forward or backward",
    refuses=_refuses,
)
