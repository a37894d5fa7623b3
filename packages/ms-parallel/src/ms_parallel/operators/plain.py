"""Norm, rotation, gate and attention in plain torch: the default operators of a model.

Shapes: B rows, S positions, H hidden, D head width. Norms and rotations are computed in float32
(float64 for float64).
"""

import weakref
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ms_parallel.operators import cpu
from ms_parallel.operators.packed_rows import attend_in_spans, boundaries_of, fits_varlen
from ms_parallel.torch_private import FakeTensor, unset_fake_temporarily


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute x / sqrt(mean(x²) + eps) · weight over the last dim.

    Args:
        x: (..., H).
        weight: (H,).
        eps: Added to the mean square.

    Returns:
        Like `x`; the mean is computed in float32 (float64 for float64).
    """
    if cpu.serves(x, weight):
        return cpu.RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return,no-untyped-call]
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Apply rotary embeddings to the first R dims of each head.

    Args:
        q: (B, S, Hq, D).
        k: (B, S, Hk, D).
        cos: (B or 1, S, R/2) float32; R ≤ D, the remaining dims pass through.
        sin: Like `cos`.
        interleaved: Rotate adjacent dims (2i, 2i+1) together instead of halves (i, i+R/2).

    Returns:
        Rotated q and k in their original dtypes.
    """
    width, cos, sin = 2 * cos.shape[-1], cos.unsqueeze(2), sin.unsqueeze(2)
    rotate = _rotate_pairs if interleaved else _rotate_halves
    in_place = not interleaved and _rotates_in_place(q, k, cos, sin)
    if not interleaved:
        # For (a, b) = halves of x: (a·cos - b·sin, b·cos + a·sin) = x·cos + roll(x)·(-sin, sin).
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def rotated(x: Tensor) -> Tensor:
        if in_place:
            y = _RotateInPlace.apply(x[..., :width], cos, sin)  # type: ignore[no-untyped-call]
        else:
            y = rotate(cpu.widen(x[..., :width]), cos, sin).to(x.dtype)
        return torch.cat((y, x[..., width:]), -1) if x.shape[-1] > width else y

    return rotated(q), rotated(k)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if cpu.serves(x, cos, sin) and not (cos.requires_grad or sin.requires_grad):
        return cpu.Rotate.apply(x, cos, sin)  # type: ignore[no-any-return,no-untyped-call]
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def _rotates_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether `_RotateInPlace` applies: eager, half precision, on an accelerator."""
    return (
        not torch.compiler.is_compiling()
        and q.device.type not in ("cpu", "meta")
        and q.dtype in (torch.bfloat16, torch.float16)
        and all(type(tensor) in (Tensor, FakeTensor) for tensor in (q, k, cos, sin))
        and not (cos.requires_grad or sin.requires_grad)
    )


class _RotateInPlace(torch.autograd.Function):
    """`x · cos + roll(x) · sin` of half precision in four kernels instead of six.

    It needs no `roll`, and casts x where it is read. Like `cpu.Rotate`, it saves only the angles;
    the backward pass is the same rotation with negated angles.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x (B, S, heads, D) by cos and sin (B or 1, S, 1, D) float32."""
        y = x * cos  # float32, or float64 for float64
        first, second = y.chunk(2, -1)  # (B, S, heads, D / 2) views of y
        # The sign of `roll` is already in the first half of `sin`.
        minus_sin, plus_sin = sin.chunk(2, -1)
        a, b = x.chunk(2, -1)
        # In place, with the cast of a and b fused: y = (a cos - b sin, b cos + a sin).
        first.addcmul_(b, minus_sin)
        second.addcmul_(a, plus_sin)
        # Gradients of attention are transposed; the cast makes them contiguous for the projections.
        return y.to(x.dtype, memory_format=torch.contiguous_format)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Save the cosines and sines."""
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Rotate the gradient of x by the negated angles; the angles get no gradient."""
        cos, sin = ctx.saved_tensors
        return _RotateInPlace.apply(grad, cos, -sin), None, None  # type: ignore[no-untyped-call]


def geglu(gate: Tensor, up: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Compute gelu(gate) · up, elementwise."""
    return F.gelu(gate, approximate=approximate) * up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) · up, elementwise."""
    return F.silu(gate) * up


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    documents: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention of the last Sq of Sk positions.

    Args:
        q: (B, Sq, Hq, D).
        k: (B, Sk, Hk, D); Hk must divide Hq.
        v: (B, Sk, Hk, Dv); Dv may differ from D.
        causal: Mask keys after the query.
        documents: (B, Sk) int32; a query sees keys of its own document only.
        window: Mask keys at a distance of `window` or more, before the query and, if not causal,
            also after it (FlashAttention's `window_size=(window - 1, window - 1)`).
        scale: Factor on the scores; 1/√D by default.
        sinks: (Hq,) extra score per head in every softmax, with a value of zero.

    Returns:
        (B, Sq, Hq, Dv).
    """
    queries, keys, width = q.shape[1], k.shape[1], v.shape[3]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    # A window of at least all keys hides nothing, and without it more kernels apply.
    window = None if window is None or window >= keys else window
    rows = None
    # With cached keys (Sk > Sq), documents are masked.
    if documents is not None and queries == keys and _avoids_masks(documents):
        rows = boundaries_of(documents)
    if rows is not None and sinks is None and fits_varlen(q, v):
        return rows.attend(q, k, v, causal=causal, window=window, scale=scale)
    if rows is not None:
        settings = {"causal": causal, "window": window, "scale": scale, "sinks": sinks}
        return attend_in_spans(attention, q, k, v, rows.lengths, **settings)
    if documents is not None:
        mask = _masks.of(documents, queries, causal, window)
    elif window is None and (not causal or queries in (1, keys)):
        mask = None
    else:
        mask = _order_mask(queries, keys, causal, window, q.device)
    # `is_causal` aligns queries to the first key, so it is right only if Sq = Sk.
    causal = causal and mask is None and queries > 1
    # Fused kernels need one head width; zero padding does not change the result.
    q, k, v = (
        F.pad(x, (0, widest - x.shape[3])) if x.shape[3] < widest else x
        for widest in [max(q.shape[3], width)]
        for x in (q, k, v)
    )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, heads, S, D)
    if sinks is None:
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    else:
        attend = cpu.attend if cpu.takes_sinks(q, k, v, sinks) else _scored
        out = attend(q, k, v, sinks, mask, causal, scale)
    return out.transpose(1, 2)[..., :width]


def _avoids_masks(documents: Tensor) -> bool:
    """Whether to avoid a dense mask, which dominates memory and time on a GPU."""
    return (
        documents.device.type == "cuda"
        and not torch.compiler.is_compiling()
        and not cpu.has_no_values(documents)
    )


def _scored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """Compute attention with sinks on (B, heads, S, D) tensors; materializes the scores."""
    group, queries = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = cpu.widen(q * scale) @ cpu.widen(k).transpose(-1, -2)
    if causal:
        mask = _order_mask(queries, k.shape[2], True, None, q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    # One more column per row, for the sink; it has no value, so its weight is dropped.
    sink_scores = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sink_scores), -1).softmax(-1)[..., :-1]
    return (weights @ cpu.widen(v)).to(v.dtype)


def _order_mask(
    queries: int, keys: int, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """Build the causal and window mask (1, 1, Sq, Sk), True for visible keys."""
    key = torch.arange(keys, device=device)
    # Queries are the last positions.
    query = key[keys - queries :, None]
    distance = query - key  # (Sq, Sk), positive for earlier keys
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        visible = visible & (distance.abs() < window)
    return visible[None, None]


def visible_mask(
    queries: int,
    keys: int,
    documents: Tensor | None,
    window: int | None,
    device: torch.device,
) -> Tensor:
    """Build the causal mask (B or 1, 1, Sq, Sk), True for visible keys."""
    mask = None if documents is None else _masks.of(documents, queries, True, window)
    return _order_mask(queries, keys, True, window, device) if mask is None else mask


class _DocumentMasks:
    """Cached masks of the latest `documents`, shared by all layers of a forward pass.

    Keyed by the tensor object and its version; dropped when the tensor is freed.
    """

    def __init__(self) -> None:
        self._documents: weakref.ref[Tensor] | None = None
        self._masks: dict[tuple[object, ...], Tensor | None] = {}

    def of(
        self, documents: Tensor, queries: int, causal: bool, window: int | None
    ) -> Tensor | None:
        """Return the mask (B, 1, Sq, Sk), True for visible keys; None if `is_causal` suffices."""
        if torch.compiler.is_compiling():  # the compiler eliminates common subexpressions
            return self._build(documents, queries, causal, window)
        if self._documents is None or self._documents() is not documents:
            self._masks = {}
            self._documents = weakref.ref(documents, self._drop_cached)
        version = 0 if documents.is_inference() else documents._version
        key = (version, queries, causal, window)
        if key not in self._masks:
            self._masks[key] = self._build(documents, queries, causal, window)
        return self._masks[key]

    def _drop_cached(self, freed: "weakref.ref[Tensor]") -> None:
        if self._documents is freed:
            self._documents, self._masks = None, {}

    @staticmethod
    def _build(documents: Tensor, queries: int, causal: bool, window: int | None) -> Tensor | None:
        keys = documents.shape[1]
        order_is_plain = window is None and (not causal or queries in (1, keys))
        # Reading values would synchronize with a GPU or break a graph, so those build the mask.
        on_cpu = documents.device.type == "cpu"
        readable = on_cpu and not torch.compiler.is_compiling() and not cpu.has_no_values(documents)
        if order_is_plain and readable:
            with unset_fake_temporarily():  # documents are real when memory is predicted, too
                if bool((documents == documents[:, :1]).all()):
                    return None
        query_documents = documents[:, None, keys - queries :, None]
        same = query_documents == documents[:, None, None, :]
        return same & _order_mask(queries, keys, causal, window, documents.device)


_masks = _DocumentMasks()
