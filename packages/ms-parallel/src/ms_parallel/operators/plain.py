"""Norm, rotation, gate and attention in plain torch: the default operators of a model.

Shapes: B rows, S positions, H hidden, D width of one head. Norms and angles are computed in
float32, in float64 for float64.
"""

import weakref
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ms_parallel.operators import cpu
from ms_parallel.operators.packed_rows import attend_in_spans, fits_varlen, recent_rows
from ms_parallel.torch_private import unset_fake_temporarily


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute x / sqrt(mean(x²) + eps) · weight over the last dim.

    Args:
        x: (..., H).
        weight: (H,).
        eps: Added to the mean square.

    Returns:
        Like `x`; the mean is taken in float32 (float64 for float64).
    """
    if cpu.serves(x, weight):
        return cpu.RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return,no-untyped-call]
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of the first R dims of each head by its position's angles.

    Args:
        q: (B, S, Hq, D).
        k: (B, S, Hk, D).
        cos: (B or 1, S, R/2) float32; R ≤ D, the rest passes through.
        sin: Like `cos`.
        interleaved: Pairs are neighbours (2i, 2i+1) instead of halves (i, i+R/2).

    Returns:
        q and k, rotated, in their own dtypes.
    """
    width, cos, sin = 2 * cos.shape[-1], cos.unsqueeze(2), sin.unsqueeze(2)
    turn = _turn_neighbours if interleaved else _turn_halves
    if not interleaved:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def rotated(x: Tensor) -> Tensor:
        y = turn(cpu.widen(x[..., :width]), cos, sin).to(x.dtype)
        return torch.cat((y, x[..., width:]), -1) if x.shape[-1] > width else y

    return rotated(q), rotated(k)


def _turn_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def _turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if cpu.serves(x, cos, sin) and not (cos.requires_grad or sin.requires_grad):
        return cpu.Rotate.apply(x, cos, sin)  # type: ignore[no-any-return,no-untyped-call]
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


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
        k: (B, Sk, Hk, D), Hk divides Hq.
        v: (B, Sk, Hk, Dv), as wide as `k` or not.
        causal: A query sees no later key.
        documents: (B, Sk) int32; a query sees keys of its own document only.
        window: Keys at a distance below `window` are seen, the query's own included: the last
            `window` of them if causal, else as many on both sides (FlashAttention's
            `window_size=(window - 1, window - 1)`).
        scale: Of the scores; 1/√D by default.
        sinks: (Hq,), one more score of each of a head's queries, whose value is zeros.

    Returns:
        (B, Sq, Hq, Dv).
    """
    queries, keys, width = q.shape[1], k.shape[1], v.shape[3]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    window = None if window is None or window >= keys else window
    rows = None
    if documents is not None and queries == keys and _avoids_masks(documents):
        rows = recent_rows.of(documents)
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
    causal = causal and mask is None and queries > 1
    # Fused kernels want one width: zeros behind the narrower change nothing.
    q, k, v = (
        F.pad(each, (0, widest - each.shape[3])) if each.shape[3] < widest else each
        for widest in [max(q.shape[3], width)]
        for each in (q, k, v)
    )
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
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
    """Whether a mask of all pairs is to be avoided: on a GPU it decides memory and speed."""
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
    """Attend with sinks, holding the scores, (B, heads, S, D) to the same."""
    group, queries = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    scores = cpu.widen(q * scale) @ cpu.widen(k).transpose(-1, -2)
    if causal:
        mask = _order_mask(queries, k.shape[2], True, None, q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    added = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    shares = torch.cat((scores, added), -1).softmax(-1)[..., :-1]
    return (shares @ cpu.widen(v)).to(v.dtype)


def _order_mask(
    queries: int, keys: int, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """Make the mask (1, 1, Sq, Sk), True where the order of positions lets a query look."""
    key = torch.arange(keys, device=device)
    query = key[keys - queries :, None]
    distance = query - key  # (Sq, Sk), positive for the past
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen = seen & (distance.abs() < window)
    return seen[None, None]


def seen_keys(
    queries: int,
    keys: int,
    documents: Tensor | None,
    window: int | None,
    device: torch.device,
) -> Tensor:
    """Make the mask (B or 1, 1, Sq, Sk), True where a causal query looks; never None."""
    made = None if documents is None else _masks.of(documents, queries, True, window)
    return _order_mask(queries, keys, True, window, device) if made is None else made


class _DocumentMasks:
    """Remembers the mask of the last `documents`: all layers of a forward ask for the same one.

    It is known by the tensor itself and its version, and goes when the tensor goes.
    """

    def __init__(self) -> None:
        self._documents: weakref.ref[Tensor] | None = None
        self._masks: dict[tuple[object, ...], Tensor | None] = {}

    def of(
        self, documents: Tensor, queries: int, causal: bool, window: int | None
    ) -> Tensor | None:
        """Return the mask (B, 1, Sq, Sk), True where a query may look; None if causality is all."""
        if torch.compiler.is_compiling():  # One graph shares what it computes twice by itself.
            return self._build(documents, queries, causal, window)
        if self._documents is None or self._documents() is not documents:
            self._masks = {}
            self._documents = weakref.ref(documents, self._forget)
        version = 0 if documents.is_inference() else documents._version
        key = (version, queries, causal, window)
        if key not in self._masks:
            self._masks[key] = self._build(documents, queries, causal, window)
        return self._masks[key]

    def _forget(self, gone: "weakref.ref[Tensor]") -> None:
        if self._documents is gone:
            self._documents, self._masks = None, {}

    @staticmethod
    def _build(documents: Tensor, queries: int, causal: bool, window: int | None) -> Tensor | None:
        keys = documents.shape[1]
        order_is_plain = window is None and (not causal or queries in (1, keys))
        # On a GPU looking would stall the queue, in a graph break it; there the mask is built.
        on_cpu = documents.device.type == "cpu"
        known = on_cpu and not torch.compiler.is_compiling() and not cpu.has_no_values(documents)
        if order_is_plain and known:
            with unset_fake_temporarily():  # numbers are known where memory is predicted too
                if bool((documents == documents[:, :1]).all()):
                    return None
        of_query = documents[:, None, keys - queries :, None]
        same = of_query == documents[:, None, None, :]
        return same & _order_mask(queries, keys, causal, window, documents.device)


_masks = _DocumentMasks()
