"""Transformer-XL (Dai et al., 2019, arXiv:1901.02860): relative positions, segment recurrence.

A sequence is read in segments. Inside layer n, segment t attends to itself and to the last
`memory_length` inputs of layer n from before it, through which no gradient flows. A layer's memory
is therefore known as soon as its input is, so all segments pass a layer together: the same numbers
as segment after segment, and a stage or a block can run alone.

Differences from the paper:
1. Plain softmax head, not an adaptive one.
2. Memory that `cache` carries between forwards is kept as keys and values, not as hidden states:
   equal values, but the key and value projections get no gradient from it.
3. Attention, and so memory, never crosses a document.

Shapes: B rows, S positions, N queries of a segment, M keys that it sees, H hidden, D width of a
head. Distances count positions within the row; inside a document they equal those of `positions`.
"""

import math
from dataclasses import dataclass

import torch
from attrs import field, frozen
from torch import Tensor, nn

from ms_parallel.errors import ConfigError
from ms_parallel.models.cache import KeyValueCache
from ms_parallel.models.config import ModelConfig, above_zero, check_heads, size
from ms_parallel.models.family import Family
from ms_parallel.models.plan import ModelPlan, Style
from ms_parallel.models.staged import Context, RowSplit, StagedModel
from ms_parallel.operators.cpu import widen
from ms_parallel.operators.protocol import Ops


@frozen(kw_only=True)
class TransformerXLConfig(ModelConfig):
    """A Transformer-XL.

    Raises:
        ConfigError: a size is not a whole number of at least 1, or sizes do not fit one another.
    """

    model_type: str = "transformer-xl"
    segment_length: int = field(validator=size)
    """Positions that gradients cross."""
    memory_length: int = field(validator=size)
    """Positions before a segment that it sees besides its own."""
    layer_norm_eps: float = field(default=1e-5, validator=above_zero)

    def __attrs_post_init__(self) -> None:
        check_heads(self.num_attention_heads, self.num_attention_heads, self.head_dim)
        if self.hidden_size % 2:
            raise ConfigError(f"hidden_size={self.hidden_size} is odd; sinusoids need an even one")
        if self.model_type != "transformer-xl":
            raise ConfigError(f"model_type is {self.model_type!r}; it must be 'transformer-xl'")


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
    """Attention whose scores depend on content and on distance (equation 5, second form)."""

    def __init__(self, config: TransformerXLConfig, layer: int) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, inner, bias=False)
        self.k_proj = nn.Linear(hidden, inner, bias=False)
        self.v_proj = nn.Linear(hidden, inner, bias=False)
        self.r_proj = nn.Linear(hidden, inner, bias=False)
        self.o_proj = nn.Linear(inner, hidden, bias=False)
        self.content_bias = PerHead(config.num_attention_heads, config.head_dim)
        self.position_bias = PerHead(config.num_attention_heads, config.head_dim)
        self.head_dim = config.head_dim
        self.layer = layer

    def forward(self, hidden: Tensor, *, context: SegmentContext) -> Tensor:
        """(B, S, H) to (B, S, H)."""
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
        """Q (B, N, heads, D), k and v (B, M, heads, D) to (B, N, heads, D)."""
        content = torch.einsum("bnhd,bmhd->bhnm", self.content_bias(q), k)
        distance = torch.einsum("bnhd,mhd->bhnm", self.position_bias(q), r[-k.shape[1] :])
        scores = widen(content + _by_key(distance)) / math.sqrt(self.head_dim)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype)
        return torch.einsum("bhnm,bmhd->bnhd", weights, v)


def _by_key(scores: Tensor) -> Tensor:
    """From columns by distance (M-1 to 0) to columns by key: the paper's appendix B.

    Query i of N, the last of which sees distance 0 at the last key, needs its row moved left by
    N-1-i. A column more makes each row of the flat tensor begin one place later, which is that.
    What enters from the right belongs to later keys, and is masked.

    Args:
        scores: (B, heads, N, M).
    """
    *outer, queries, keys = scores.shape
    padded = nn.functional.pad(scores, (1, 0))
    return padded.reshape(*outer, keys + 1, queries)[..., 1:, :].reshape(*outer, queries, keys)


class FeedForward(nn.Module):
    """Two linear maps with ReLU between."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        return self.down_proj(self.up_proj(hidden).relu())  # type: ignore[no-any-return]


class Block(nn.Module):
    """One post-norm layer; the unit of recomputation and sharding."""

    def __init__(self, config: TransformerXLConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = RelativeAttention(config, layer)
        self.attention_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = FeedForward(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, hidden: Tensor, *, context: SegmentContext) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        hidden = self.attention_norm(hidden + self.self_attn(hidden, context=context))
        return self.mlp_norm(hidden + self.mlp(hidden))  # type: ignore[no-any-return]


class TransformerXL(StagedModel):
    """A whole Transformer-XL, or one pipeline stage of it.

    Args:
        config: The model.
        ops: Not used: its scores are of their own kind.
        layers: Global numbers of the blocks to build; all by default.
        first: Build the embedding.
        last: Build the head; there is no final norm, since each block ends with one.
    """

    def __init__(
        self,
        config: TransformerXLConfig,
        *,
        ops: Ops | None = None,
        layers: range | None = None,
        first: bool = True,
        last: bool = True,
    ) -> None:
        super().__init__(
            config,
            block=lambda layer: Block(config, layer),
            norm=nn.Identity,
            layers=layers,
            first=first,
            last=last,
        )
        self.config: TransformerXLConfig = config

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, S) int64 to (B, S, H), scaled by √H to stand beside the norms' outputs."""
        return super().embed(tokens) * math.sqrt(self.config.hidden_size)

    def context(
        self,
        positions: Tensor,
        documents: Tensor | None,
        cache: KeyValueCache | None,
        row_split: RowSplit | None = None,
    ) -> SegmentContext:
        """The segments of the new positions, beside documents and cache."""
        held = cache.length if cache is not None else 0
        segments = self._segments(held, held + positions.shape[1], documents, positions.device)
        longest = max(segment.end - segment.memory for segment in segments)
        distances = sinusoids(longest, self.config.hidden_size, positions.device)
        return SegmentContext(
            segments=segments, distances=distances, documents=documents, cache=cache
        )

    def _segments(
        self, start: int, end: int, documents: Tensor | None, device: torch.device
    ) -> list[Segment]:
        """Segments begin at multiples of their length, however the positions arrive."""
        length, segments = self.config.segment_length, []
        while start < end:
            begin = start // length * length
            stop, memory = min(begin + length, end), max(0, begin - self.config.memory_length)
            key = torch.arange(memory, stop, device=device)
            seen = (key <= key[start - memory :, None])[None, None]
            if documents is not None:
                of_key = documents[:, None, memory:stop]
                seen = seen & (of_key[..., start - memory :, None] == of_key[..., None, :])
            segments.append(Segment(memory=memory, start=start, end=stop, seen=seen))
            start = stop
        return segments


def sinusoids(count: int, width: int, device: torch.device) -> Tensor:
    """(count, width) float32: sines, then cosines, of the distances count-1 to 0."""
    distance = torch.arange(count - 1, -1, -1, dtype=torch.float32, device=device)
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angles = distance[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), -1)


def _plan(config: TransformerXLConfig) -> ModelPlan:
    """How a Transformer-XL may be split."""
    layer = "model.layers.*"
    tensor: dict[str, Style] = {
        "model.embed_tokens": "vocabulary",
        f"{layer}.self_attn.q_proj": "column",
        f"{layer}.self_attn.k_proj": "column",
        f"{layer}.self_attn.v_proj": "column",
        f"{layer}.self_attn.r_proj": "column",
        f"{layer}.self_attn.o_proj": "row",
        f"{layer}.self_attn.content_bias": "split_heads",
        f"{layer}.self_attn.position_bias": "split_heads",
        f"{layer}.attention_norm": "sequence",
        f"{layer}.mlp.up_proj": "column",
        f"{layer}.mlp.down_proj": "row",
        f"{layer}.mlp_norm": "sequence",
        "lm_head": "vocabulary",
    }
    tied = (("model.embed_tokens.weight", "lm_head.weight"),) if config.tie_word_embeddings else ()
    return ModelPlan(
        tensor=tensor, blocks=layer, cuts=tuple(range(config.num_hidden_layers)), tied=tied
    )


FAMILY = Family(
    name="transformer-xl",
    config=TransformerXLConfig,
    model=TransformerXL,
    plan=_plan,
    packs=False,  # segments begin where the row's do, not the document's
    needs_whole_rows="a segment attends to the states of the one before it",
    small={
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "head_dim": 32,
        "segment_length": 128,
        "memory_length": 128,
    },
)
