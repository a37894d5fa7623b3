"""The decoder of the Llama family: Llama, Mistral, Qwen 2 and Qwen 3, as single-device code.

Modules bear Hugging Face's names, so no conversion of weights exists. Under a tensor-parallel
split the same code runs: head counts come from the local width of the projections.
Shapes: B rows, S positions, H hidden, V vocabulary, D width of one head.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ms_parallel import operators
from ms_parallel.models.cache import KeyValueCache
from ms_parallel.models.decoder_config import DecoderConfig, RopeScaling
from ms_parallel.models.plan import ModelPlan, Style
from ms_parallel.models.spans import attend_in_spans, document_lengths
from ms_parallel.models.staged import Context, StagedModel
from ms_parallel.operators import Ops

__all__ = ["Block", "Decoder", "plan"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RotaryContext(Context):
    """The angles of one forward's positions."""

    cos: Tensor
    """(B or 1, S, D/2) float32."""
    sin: Tensor
    lengths: tuple[int, ...] | None
    """Of the documents of all rows, where each can be attended to alone."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim."""

    def __init__(self, width: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same."""
        return self.ops.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig, layer: int, ops: Ops) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
        self.q_proj = nn.Linear(hidden, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, hidden, bias=config.attention_output_bias)
        if config.query_key_norm:
            self.q_norm = RMSNorm(width, config.rms_norm_eps, ops)
            self.k_norm = RMSNorm(width, config.rms_norm_eps, ops)
        self.query_key_norm = config.query_key_norm
        self.head_dim = width
        self.window = config.window(layer)
        self.layer = layer
        self.ops = ops

    def forward(self, hidden: Tensor, *, context: RotaryContext) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        q, k, v = (
            projection(hidden).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # (B, S, heads, D)
        if self.query_key_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.ops.rotary(q, k, context.cos, context.sin)
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)
        # A block compiled alone would be compiled anew for each batch's lengths.
        if not torch.compiler.is_compiling() and context.lengths is not None:
            out = attend_in_spans(self.ops.attention, q, k, v, context.lengths, window=self.window)
        else:
            out = self.ops.attention(q, k, v, documents=context.documents, window=self.window)
        return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: DecoderConfig, ops: Ops) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)
        self.ops = ops

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        inner = self.ops.swiglu(self.gate_proj(hidden), self.up_proj(hidden))
        return self.down_proj(inner)  # type: ignore[no-any-return]


class Block(nn.Module):
    """One pre-norm layer; the unit of recomputation and sharding."""

    def __init__(self, config: DecoderConfig, layer: int, ops: Ops) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.self_attn = Attention(config, layer, ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.mlp = FeedForward(config, ops)

    def forward(self, hidden: Tensor, *, context: RotaryContext) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context=context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class Decoder(StagedModel):
    """A whole decoder, or one pipeline stage of it.

    Args:
        config: The model.
        ops: Operators; plain torch by default.
        block: Builds the block of a layer's global number.
        layers: Global numbers of the blocks to build; all by default.
        first: Build the embedding.
        last: Build the final norm and the head.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        ops: Ops = operators,
        block: Callable[[DecoderConfig, int, Ops], nn.Module] = Block,
        layers: range | None = None,
        first: bool = True,
        last: bool = True,
    ) -> None:
        super().__init__(
            config,
            block=lambda layer: block(config, layer, ops),
            norm=lambda: RMSNorm(config.hidden_size, config.rms_norm_eps, ops),
            layers=layers,
            first=first,
            last=last,
        )
        self.config: DecoderConfig = config

    def context(
        self, positions: Tensor, documents: Tensor | None, cache: KeyValueCache | None
    ) -> RotaryContext:
        """The rotary tables of the positions, beside documents and cache."""
        cos, sin = rotary_tables(self.config, positions)
        lengths = document_lengths(documents) if cache is None else None
        return RotaryContext(cos=cos, sin=sin, documents=documents, cache=cache, lengths=lengths)


def rotary_tables(config: DecoderConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of each position, (B or 1, S, D/2) float32."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / config.rope_theta ** (half / config.head_dim)
    if config.rope_scaling is not None:
        frequencies = _scale(frequencies, config.rope_scaling)
    angles = positions[..., None].float() * frequencies
    return angles.cos(), angles.sin()


def _scale(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    original = scaling.original_max_position_embeddings
    turns = original * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0: stretch fully, 1: leave alone
    return frequencies * (keep + (1 - keep) / scaling.factor)


def plan(config: DecoderConfig) -> ModelPlan:
    """How a decoder may be split."""
    layer = "model.layers.*"
    tensor: dict[str, Style] = {
        "model.embed_tokens": "vocabulary",
        f"{layer}.input_layernorm": "sequence",
        f"{layer}.self_attn.q_proj": "column",
        f"{layer}.self_attn.k_proj": "column",
        f"{layer}.self_attn.v_proj": "column",
        f"{layer}.self_attn.o_proj": "row",
        f"{layer}.post_attention_layernorm": "sequence",
        f"{layer}.mlp.gate_proj": "column",
        f"{layer}.mlp.up_proj": "column",
        f"{layer}.mlp.down_proj": "row",
        "model.norm": "sequence",
        "lm_head": "vocabulary",
    }
    if config.query_key_norm:
        tensor |= {f"{layer}.self_attn.q_norm": "heads", f"{layer}.self_attn.k_norm": "heads"}
    tied = (("model.embed_tokens.weight", "lm_head.weight"),) if config.tie_word_embeddings else ()
    return ModelPlan(
        tensor=tensor, blocks=layer, cuts=tuple(range(config.num_hidden_layers)), tied=tied
    )
