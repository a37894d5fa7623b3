"""Transformer-XL (Dai et al., 2019, arXiv:1901.02860): relative positions, segment recurrence.

A sequence is processed in segments. In layer n a segment attends to itself and to the preceding
`memory_length` inputs of layer n, without gradient through the latter. A layer's memory depends
only on its input, so all segments of a layer are computed together, with the same result as one
after another. Blocks and pipeline stages can therefore run separately.

Differences from the paper:
1. Plain softmax head instead of adaptive softmax.
2. Across forward passes, `cache` stores memory as keys and values instead of hidden states: the
   same values, but the key and value projections get no gradient from it.
3. Attention, and therefore memory, never crosses documents.

Shapes: B rows, S positions, H hidden.
"""

import math

from attrs import field, frozen
from torch import Tensor, nn

from ms_parallel.errors import ConfigError
from ms_parallel.models.cache import KeyValueCache
from ms_parallel.models.config import ModelConfig, above_zero, check_heads, size
from ms_parallel.models.family import Family
from ms_parallel.models.parts.relative_attention import (
    RelativeAttention,
    SegmentContext,
    segments_of,
    sinusoids,
)
from ms_parallel.models.plan import ModelPlan, Style
from ms_parallel.models.staged import RowSplit, StagedModel
from ms_parallel.operators.protocol import Ops


@frozen(kw_only=True)
class TransformerXLConfig(ModelConfig):
    """Configuration of Transformer-XL.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    model_type: str = "transformer-xl"
    segment_length: int = field(validator=size)
    """Segment length in positions; gradients do not flow between segments of a layer."""
    memory_length: int = field(validator=size)
    """Number of visible positions before a segment."""
    layer_norm_eps: float = field(default=1e-5, validator=above_zero)

    def __attrs_post_init__(self) -> None:
        check_heads(self.num_attention_heads, self.num_attention_heads, self.head_dim)
        if self.hidden_size % 2:
            raise ConfigError(
                f"hidden_size must be even for sinusoidal positions, got {self.hidden_size}"
            )
        if self.model_type != "transformer-xl":
            raise ConfigError(f"model_type must be 'transformer-xl', got {self.model_type!r}")


class FeedForward(nn.Module):
    """Feed-forward with ReLU."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (B, S, H) to (B, S, H)."""
        return self.down_proj(self.up_proj(hidden).relu())  # type: ignore[no-any-return]


class Block(nn.Module):
    """Post-norm layer; the unit of activation checkpointing and sharding."""

    def __init__(self, config: TransformerXLConfig, layer: int) -> None:
        super().__init__()
        heads, width = config.num_attention_heads, config.head_dim
        self.self_attn = RelativeAttention(config.hidden_size, heads, width, layer)
        self.attention_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = FeedForward(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, hidden: Tensor, *, context: SegmentContext) -> Tensor:
        """Map (B, S, H) to (B, S, H)."""
        hidden = self.attention_norm(hidden + self.self_attn(hidden, context=context))
        return self.mlp_norm(hidden + self.mlp(hidden))  # type: ignore[no-any-return]


class TransformerXL(StagedModel):
    """A Transformer-XL or one of its pipeline stages.

    Args:
        config: Model configuration.
        ops: Unused; relative attention has no fused operator.
        layers: Global indices of the blocks to build; all by default.
        first: Build the embedding.
        last: Build the head; a final norm is not needed, since every block ends with a norm.
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
        """Embed (B, S) int64 to (B, S, H), scaled by √H to match the scale of norm outputs."""
        return super().embed(tokens) * math.sqrt(self.config.hidden_size)

    def context(
        self,
        positions: Tensor,
        documents: Tensor | None,
        cache: KeyValueCache | None,
        row_split: RowSplit | None = None,
    ) -> SegmentContext:
        """Build the context of the blocks: segments, distances, documents and cache."""
        cached = cache.length if cache is not None else 0
        segments = segments_of(
            cached,
            cached + positions.shape[1],
            self.config.segment_length,
            self.config.memory_length,
            documents,
            positions.device,
        )
        # One table for all segments: each uses its last rows.
        longest = max(segment.end - segment.memory for segment in segments)
        distances = sinusoids(longest, self.config.hidden_size, positions.device)
        return SegmentContext(
            segments=segments, distances=distances, documents=documents, cache=cache
        )


def _plan(config: TransformerXLConfig) -> ModelPlan:
    """Return the parallel plan of a Transformer-XL."""
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
    packs=False,  # segments are aligned to the row, not to the document
    needs_whole_rows="a segment attends to states of the preceding segment",
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
