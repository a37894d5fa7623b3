"""Llama-style decoders as single-device code, and their parallel plan.

Modules have Hugging Face's names, so weights need no conversion.
Shapes: B rows, S positions, H hidden, V vocabulary.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ms_parallel import operators
from ms_parallel.models.cache import KeyValueCache
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.parts.attention import RotaryContext
from ms_parallel.models.parts.block import PRE_NORM, Block, Norms
from ms_parallel.models.parts.norm import RMSNorm
from ms_parallel.models.plan import ModelPlan, Style
from ms_parallel.models.positions.tables import check_growth, document_ends, rotary_tables
from ms_parallel.models.spans import document_lengths
from ms_parallel.models.staged import RowSplit, StagedModel
from ms_parallel.operators.packed_rows import block_mask
from ms_parallel.operators.protocol import Ops


class Decoder(StagedModel):
    """A decoder or one of its pipeline stages.

    Args:
        config: Model configuration.
        ops: Operators; plain torch by default.
        block: Builds a block from (config, global layer index, ops).
        norm: Builds the final norm from (width, eps, ops).
        layers: Global indices of the blocks to build; all by default.
        first: Build the embedding.
        last: Build the final norm and the head.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        ops: Ops = operators,
        block: Callable[[DecoderConfig, int, Ops], nn.Module] = Block,
        norm: Callable[[int, float, Ops], nn.Module] = RMSNorm,
        layers: range | None = None,
        first: bool = True,
        last: bool = True,
    ) -> None:
        super().__init__(
            config,
            block=lambda layer: block(config, layer, ops),
            norm=lambda: norm(config.hidden_size, config.rms_norm_eps, ops),
            layers=layers,
            first=first,
            last=last,
        )
        self.config: DecoderConfig = config
        self.ropes = config.ropes
        self.grows = any(rope.length_limit is not None for rope in config.ropes)
        """Whether rotary frequencies depend on document lengths."""
        self.embedding_scale, self.logit_divisor = config.embedding_scale, config.logit_divisor
        self.flex_attention = False
        """Whether compiled blocks use FlexAttention for packed documents."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens (B, S) int64 to (B, S, H), with the family's embedding scale."""
        hidden = super().embed(tokens)
        if self.embedding_scale is None:
            return hidden
        # Rounded to the weights' dtype; `full` builds it on the device, without a host sync.
        scale = torch.full((), self.embedding_scale, dtype=hidden.dtype, device=hidden.device)
        return hidden * scale

    def finish(self, hidden: Tensor) -> Tensor:
        """Apply the final norm and the family's logit divisor to (B, S, H)."""
        normed = super().finish(hidden)
        return normed if self.logit_divisor == 1.0 else normed / self.logit_divisor

    def context(
        self,
        positions: Tensor,
        documents: Tensor | None,
        cache: KeyValueCache | None,
        row_split: RowSplit | None = None,
    ) -> RotaryContext:
        """Build the context of the blocks: rotary tables, documents, masks and cache."""
        ends = None
        if self.grows:
            ends = document_ends(positions, documents)
            cached = cache.length if cache is not None else 0
            for rope in self.ropes:
                check_growth(rope, positions, ends, cached)
        # Lengths and limits concern the full row, so they come before the split.
        if row_split is not None:
            positions = row_split.select_local(positions)
            ends = None if ends is None else row_split.select_local(ends)
        tables = tuple(rotary_tables(rope, positions, ends) for rope in self.ropes)
        # Per-document attention and block masks need all positions of the row at once.
        whole_rows = cache is None and row_split is None
        block_masks = None
        if self.flex_attention and whole_rows and documents is not None:
            windows = {self.config.window(layer) for layer in range(self.config.num_hidden_layers)}
            block_masks = {window: block_mask(documents, window) for window in windows}
        return RotaryContext(
            tables=tables,
            documents=documents,
            cache=cache,
            lengths=document_lengths(documents) if whole_rows else None,
            block_masks=block_masks,
            row_split=row_split,
        )


def plan(config: DecoderConfig) -> ModelPlan:
    """Return the parallel plan of a Llama decoder."""
    return plan_with(config)


def plan_with(
    config: DecoderConfig,
    *,
    norms: Norms = PRE_NORM,
    modules: Mapping[str, Style | None] | None = None,
) -> ModelPlan:
    """Return the parallel plan of a decoder.

    Args:
        config: Model configuration.
        norms: Norms of a block.
        modules: Styles by module name within a block; they extend or override a Llama block's, and
            None removes an entry.
    """
    layer = "model.layers.*"
    block_styles: dict[str, Style | None] = {
        "self_attn.q_proj": "column",
        "self_attn.k_proj": "column",
        "self_attn.v_proj": "column",
        "self_attn.o_proj": "row",
        "mlp.gate_proj": "column",
        "mlp.up_proj": "column",
        "mlp.down_proj": "row",
    }
    if config.query_key_norm:
        block_styles |= {"self_attn.q_norm": "heads", "self_attn.k_norm": "heads"}
    mixture = config.mixture
    # Every layer has experts, so there are no dense projections to split.
    if mixture is not None and set(mixture.layers) >= set(range(config.num_hidden_layers)):
        block_styles |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
    block_styles |= {**dict.fromkeys(norms.names, "sequence"), **(modules or {})}
    tensor: dict[str, Style] = {
        "model.embed_tokens": "vocabulary",
        **{f"{layer}.{name}": style for name, style in block_styles.items() if style is not None},
        "model.norm": "sequence",
        "lm_head": "vocabulary",
    }
    tied = (("model.embed_tokens.weight", "lm_head.weight"),) if config.tie_word_embeddings else ()
    return ModelPlan(
        tensor=tensor, blocks=layer, cuts=tuple(range(config.num_hidden_layers)), tied=tied
    )
