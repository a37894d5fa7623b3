"""The operators a model is made of: the seam's Protocol, and the default in plain torch.

The module itself fits `Ops`, and so does `ms_kernels`: pass either as `ops=`.
Shapes: B rows, S positions, H hidden, V vocabulary, D width of one head.
"""

from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = [
    "Ops",
    "attention",
    "cross_entropy",
    "linear_cross_entropy",
    "rms_norm",
    "rotary",
    "swiglu",
]

Reduction = Literal["mean", "sum", "none"]

_CHUNK_BYTES = 1 << 28
"""Logits of one chunk of `linear_cross_entropy`; up to this much they are kept, not recomputed."""


class Ops(Protocol):
    """What a model asks of its operators."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float = ...) -> Tensor:
        """As `ms_parallel.ops.rms_norm`."""
        ...

    def rotary(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = ...
    ) -> tuple[Tensor, Tensor]:
        """As `ms_parallel.ops.rotary`."""
        ...

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """As `ms_parallel.ops.swiglu`."""
        ...

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = ...,
        documents: Tensor | None = ...,
        window: int | None = ...,
        scale: float | None = ...,
    ) -> Tensor:
        """As `ms_parallel.ops.attention`."""
        ...

    def linear_cross_entropy(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = ...,
        reduction: Reduction = ...,
    ) -> Tensor:
        """As `ms_parallel.ops.linear_cross_entropy`."""
        ...


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """X / sqrt(mean(x²) + eps) · weight over the last dim.

    Args:
        x: (..., H).
        weight: (H,).
        eps: Added to the mean square.

    Returns:
        Like `x`; the mean is taken in float32.
    """
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
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width].float(), x[..., width:]
    if interleaved:
        a, b = turned.reshape(*turned.shape[:-1], -1, 2).unbind(-1)
        y = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    y = y.to(x.dtype)
    return torch.cat((y, rest), -1) if rest.shape[-1] else y


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, elementwise."""
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
) -> Tensor:
    """Softmax attention of the last Sq of Sk positions.

    Args:
        q: (B, Sq, Hq, D).
        k: (B, Sk, Hk, D), Hk divides Hq.
        v: Like `k`.
        causal: A query sees no later key.
        documents: (B, Sk) int32; a query sees keys of its own document only.
        window: A query sees its last `window` keys, itself included.
        scale: Of the scores; 1/√D by default.

    Returns:
        (B, Sq, Hq, D).
    """
    queries, keys = q.shape[1], k.shape[1]
    mask = None
    plain = causal and documents is None and (window is None or window >= keys)
    if not (plain and (queries == keys or queries == 1)):
        mask = _mask(queries, keys, causal, documents, window, q.device)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None and queries > 1,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def _mask(
    queries: int,
    keys: int,
    causal: bool,
    documents: Tensor | None,
    window: int | None,
    device: torch.device,
) -> Tensor:
    """True where a query may look: (1 or B, 1, Sq, Sk)."""
    key = torch.arange(keys, device=device)
    query = key[keys - queries :, None]
    mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
    if causal:
        mask = mask & (key <= query)
    if window is not None:
        mask = mask & (key > query - window)
    if documents is not None:
        mask = mask & (documents[:, None, keys - queries :, None] == documents[:, None, None, :])
    return mask


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """-log p(target) under softmax(logits), plus z_loss · logsumexp².

    Args:
        logits: (..., V).
        targets: (...) int64; `ignore_index` counts nothing.
        ignore_index: Target that has no loss.
        label_smoothing: Share of the target spread over all classes.
        z_loss: Weight of the squared log-normaliser.
        reduction: `"mean"` over counted targets, `"sum"`, or `"none"` (zero where ignored).

    Returns:
        float32 scalar, or (...) for `"none"`.
    """
    flat = logits.reshape(-1, logits.shape[-1]).float()
    targets_flat = targets.reshape(-1)
    losses = F.cross_entropy(
        flat,
        targets_flat,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    counted = targets_flat != ignore_index
    if z_loss:
        losses = losses + z_loss * flat.logsumexp(-1).square() * counted
    if reduction == "none":
        return losses.reshape(targets.shape)
    total = losses.sum()
    return total / counted.sum() if reduction == "mean" else total


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """`cross_entropy(hidden @ weight.T, targets)` in chunks, whose logits are recomputed.

    Args:
        hidden: (..., H).
        weight: (V, H).
        targets: (...) int64.
        ignore_index: As in `cross_entropy`, like the rest.
        label_smoothing: See there.
        z_loss: See there.
        reduction: See there.

    Returns:
        float32 scalar, or (...) for `"none"`.
    """

    def losses_of(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(
            F.linear(rows, weight),
            targets,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction="none",
        )

    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    size = max(1, _CHUNK_BYTES // (4 * weight.shape[0]))
    if rows.shape[0] <= size:
        losses = losses_of(rows, weight, flat)
    else:
        chunks = zip(torch.split(rows, size), torch.split(flat, size), strict=True)
        losses = torch.cat(
            [checkpoint(losses_of, h, weight, t, use_reentrant=False) for h, t in chunks]
        )
    if reduction == "none":
        return losses.reshape(targets.shape)
    total = losses.sum()
    return total / (flat != ignore_index).sum() if reduction == "mean" else total
