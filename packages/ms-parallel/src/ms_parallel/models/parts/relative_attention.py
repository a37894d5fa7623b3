"""Attention within segments of a row, by content and distance (Dai et al., 2019, arXiv:1901.02860).

Inside a layer, segment t attends to itself and to the inputs of that layer from before it, through
which no gradient flows.

Shapes: B rows, S positions, N queries of a segment, M keys that it sees, H hidden, D width of a
head. Distances count positions within the row; inside a document they equal those of `positions`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ms_parallel.models.staged import Context
from ms_parallel.operators.cpu import widen


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Positions [start, end) of a row, counted from the cache's first, that attend together."""

    memory: int
    """First position that they see."""
    start: int
    end: int
    seen: Tensor
    """(B or 1, 1, N, M) bool: which of the positions [memory, end) each of them sees."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentContext(Context):
    """How one forward falls into segments."""

    segments: list[Segment]
    distances: Tensor
    """(longest M, H): sinusoids of the distances M-1 to 0."""


class PerHead(nn.Module):
    """A vector a head, (heads, D)."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, width))

    def forward(self, q: Tensor) -> Tensor:
        """Add it to queries (B, N, heads, D)."""
        return q + self.weight


class RelativeAttention(nn.Module):
    """Attention whose scores depend on content and on distance (equation 5, second form).

    Args:
        hidden: H.
        heads: how many.
        head_dim: D.
        layer: its number, under which a cache keeps its keys and values.
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
        r = self._heads(self.r_proj(context.distances.to(q.dtype)))  # (longest M, heads, D)
        held = context.segments[0].start
        if context.cache is not None:
            past_k, past_v = context.cache.append(self.layer, k, v)
        elif torch.is_grad_enabled() and len(context.segments) > 1:
            past = hidden.detach()
            past_k, past_v = self._heads(self.k_proj(past)), self._heads(self.v_proj(past))
        else:
            past_k, past_v = k, v
        outputs = []
        for s in context.segments:
            own = slice(s.start - held, s.end - held)
            keys = torch.cat((past_k[:, s.memory : s.start], k[:, own]), 1)
            values = torch.cat((past_v[:, s.memory : s.start], v[:, own]), 1)
            outputs.append(self._attend(q[:, own], keys, values, r, s.seen))
        return self.o_proj(torch.cat(outputs, 1).flatten(-2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, r: Tensor, seen: Tensor) -> Tensor:
        """Attend by q (B, N, heads, D) to k and v (B, M, heads, D); return (B, N, heads, D)."""
        content = torch.einsum("bnhd,bmhd->bhnm", self.content_bias(q), k)
        distance = torch.einsum("bnhd,mhd->bhnm", self.position_bias(q), r[-k.shape[1] :])
        scores = widen(content + _by_key(distance)) / math.sqrt(self.head_dim)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype)
        return torch.einsum("bhnm,bmhd->bnhd", weights, v)


def _by_key(scores: Tensor) -> Tensor:
    """Turn columns by distance (M-1 to 0) into columns by key, as in the paper's appendix B.

    Query i of N, the last of which sees distance 0 at the last key, needs its row moved left by
    N-1-i. A column more makes each row of the flat tensor begin one place later, which is that.
    What enters from the right belongs to later keys, and is masked.

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
    """Cut positions [start, end) into segments, which begin at multiples of their length.

    Args:
        start: of the new positions, behind those that a cache holds.
        end: of the new positions.
        length: of a segment.
        memory_length: positions before a segment that it sees.
        documents: (B, end), which never see another; None for one.
        device: of what is made.
    """
    segments = []
    while start < end:
        begin = start // length * length
        stop, memory = min(begin + length, end), max(0, begin - memory_length)
        key = torch.arange(memory, stop, device=device)
        seen = (key <= key[start - memory :, None])[None, None]
        if documents is not None:
            of_key = documents[:, None, memory:stop]
            seen = seen & (of_key[..., start - memory :, None] == of_key[..., None, :])
        segments.append(Segment(memory=memory, start=start, end=stop, seen=seen))
        start = stop
    return segments


def sinusoids(count: int, width: int, device: torch.device) -> Tensor:
    """Compute sines, then cosines, of the distances count-1 to 0: (count, width) float32."""
    distance = torch.arange(count - 1, -1, -1, dtype=torch.float32, device=device)
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angles = distance[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), -1)
