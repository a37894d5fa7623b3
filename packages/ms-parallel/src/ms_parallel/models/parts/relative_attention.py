"""Segment attention with relative positions (Dai et al., 2019, arXiv:1901.02860).

A segment attends to itself and to earlier inputs of the layer, which get no gradient from it.

Shapes: B rows, S positions, N queries of a segment, M visible keys, H hidden, D head width.
Distances count positions in the row; within a document they equal differences of `positions`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ms_parallel.models.staged import Context
from ms_parallel.operators.cpu import widen


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Segment of positions [start, end) in a row, counted from the first cached position."""

    memory: int
    """First visible position."""
    start: int
    end: int
    mask: Tensor
    """(B or 1, 1, N, M) bool: visible positions in [memory, end)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentContext(Context):
    """Segments of one forward pass."""

    segments: list[Segment]
    distances: Tensor
    """(max M, H): sinusoids of the distances M-1 to 0."""


class PerHead(nn.Module):
    """Bias vector per head, (heads, D)."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, width))

    def forward(self, q: Tensor) -> Tensor:
        """Add the bias to queries (B, N, heads, D)."""
        return q + self.weight


class RelativeAttention(nn.Module):
    """Attention whose scores depend on content and on distance (equation 5, second form).

    Args:
        hidden: hidden size H.
        heads: number of heads.
        head_dim: head width D.
        layer: layer index, the key of its entries in a cache.
    """

    def __init__(self, hidden: int, heads: int, head_dim: int, layer: int) -> None:
        super().__init__()
        inner = heads * head_dim
        self.q_proj = nn.Linear(hidden, inner, bias=False)
        self.k_proj = nn.Linear(hidden, inner, bias=False)
        self.v_proj = nn.Linear(hidden, inner, bias=False)
        self.r_proj = nn.Linear(hidden, inner, bias=False)
        self.o_proj = nn.Linear(inner, hidden, bias=False)
        self.content_bias = PerHead(heads, head_dim)
        self.position_bias = PerHead(heads, head_dim)
        self.head_dim = head_dim
        self.layer = layer

    def forward(self, hidden: Tensor, *, context: SegmentContext) -> Tensor:
        """Map (B, S, H) to (B, S, H)."""
        q, k, v = (self._heads(p(hidden)) for p in (self.q_proj, self.k_proj, self.v_proj))
        # Segments use the last rows of the same table, as it ends at distance 0.
        r = self._heads(self.r_proj(context.distances.to(q.dtype)))  # (max M, heads, D)
        cached = context.segments[0].start
        if context.cache is not None:
            past_k, past_v = context.cache.append(self.layer, k, v)
        elif torch.is_grad_enabled() and len(context.segments) > 1:
            # Memory has no gradient, so its keys and values come from detached inputs.
            past = hidden.detach()
            past_k, past_v = self._heads(self.k_proj(past)), self._heads(self.v_proj(past))
        else:
            past_k, past_v = k, v
        outputs = []
        for s in context.segments:
            part = slice(s.start - cached, s.end - cached)
            keys = torch.cat((past_k[:, s.memory : s.start], k[:, part]), 1)
            values = torch.cat((past_v[:, s.memory : s.start], v[:, part]), 1)
            outputs.append(self._attend(q[:, part], keys, values, r, s.mask))
        return self.o_proj(torch.cat(outputs, 1).flatten(-2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, r: Tensor, mask: Tensor) -> Tensor:
        """Compute attention of q (B, N, heads, D) over k and v (B, M, heads, D)."""
        # Terms (a) and (c) of equation 5 together: (q + u) · k.
        content = torch.einsum("bnhd,bmhd->bhnm", self.content_bias(q), k)
        # Terms (b) and (d): (q + v) · r, with columns by distance.
        distance = torch.einsum("bnhd,mhd->bhnm", self.position_bias(q), r[-k.shape[1] :])
        scores = widen(content + _by_key(distance)) / math.sqrt(self.head_dim)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype)
        return torch.einsum("bhnm,bmhd->bnhd", weights, v)


def _by_key(scores: Tensor) -> Tensor:
    """Shift columns indexed by distance (M-1 to 0) to columns indexed by key (appendix B).

    The last query has distance 0 to the last key, so the row of query i of N moves left by N-1-i.
    Padding one column and reshaping moves each row one column right relative to the row above it.
    Entries that wrap around belong to later keys and are masked.

    Args:
        scores: (B, heads, N, M).
    """
    *outer, queries, keys = scores.shape
    padded = nn.functional.pad(scores, (1, 0))
    return padded.reshape(*outer, keys + 1, queries)[..., 1:, :].reshape(*outer, queries, keys)


def segments_of(
    start: int,
    end: int,
    length: int,
    memory_length: int,
    documents: Tensor | None,
    device: torch.device,
) -> list[Segment]:
    """Split positions [start, end) into segments aligned to multiples of their length.

    Args:
        start: first new position, after the cached ones.
        end: end of the new positions.
        length: segment length.
        memory_length: number of visible positions before a segment.
        documents: (B, end); attention never crosses documents. None: one document per row.
        device: device of the masks.
    """
    segments = []
    while start < end:
        aligned = start // length * length
        # Memory is counted from the aligned start, so all queries of a segment see the same
        # first key, also when generation enters it midway.
        stop, memory = min(aligned + length, end), max(0, aligned - memory_length)
        key = torch.arange(memory, stop, device=device)
        mask = (key <= key[start - memory :, None])[None, None]  # causal, (1, 1, N, M)
        if documents is not None:
            visible = documents[:, None, memory:stop]  # (B, 1, M)
            mask = mask & (visible[..., start - memory :, None] == visible[..., None, :])
        segments.append(Segment(memory=memory, start=start, end=stop, mask=mask))
        start = stop
    return segments


def sinusoids(count: int, width: int, device: torch.device) -> Tensor:
    """Compute sines, then cosines, of the distances count-1 to 0: (count, width) float32."""
    distance = torch.arange(count - 1, -1, -1, dtype=torch.float32, device=device)
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angles = distance[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), -1)
