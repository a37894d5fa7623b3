"""Grouped-query attention with rotary positions.

The same code runs under tensor parallelism: head counts follow from the local width of the
projections. Shapes: B rows, S positions, H hidden, D head width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.parts.norm import RMSNorm
from ms_parallel.models.staged import Context
from ms_parallel.operators.capped import capped_attention
from ms_parallel.operators.packed_rows import attend_in_blocks, attend_in_spans
from ms_parallel.operators.protocol import Ops

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, kw_only=True, eq=False)
class RotaryContext(Context):
    """Rotary tables and masks of one forward pass."""

    tables: tuple[tuple[Tensor, Tensor], ...]
    """Cosines and sines, (B or 1, S, width/2) float32, for each of the config's `ropes`."""
    lengths: tuple[int, ...] | None
    """Document lengths of all rows, to compute attention per document on a CPU; None to mask."""
    block_masks: "Mapping[int | None, BlockMask] | None" = None
    """FlexAttention mask per window, for compiled blocks on a GPU."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Args:
        config: Model configuration.
        layer: Global layer index, which selects the window and the rotary positions.
        ops: Operators.
        norm: Builds the norms of queries and keys from (width, eps, ops).
        sinks: Add a learned sink score per head, as in gpt-oss.
        softcap: Soft cap on the scores; None for no cap.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        ops: Ops,
        *,
        norm: Callable[[int, float, Ops], nn.Module] = RMSNorm,
        sinks: bool = False,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
        self.q_proj = nn.Linear(hidden, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, hidden, bias=config.attention_output_bias)
        if config.query_key_norm:
            self.q_norm = norm(width, config.rms_norm_eps, ops)
            self.k_norm = norm(width, config.rms_norm_eps, ops)
        self.sinks = Sinks(config.num_attention_heads) if sinks else None
        self.query_key_norm = config.query_key_norm
        self.head_dim = width
        self.window = config.window(layer)
        self.rope = config.rope_of(layer)
        self.interleaved = config.rotary_interleaved
        self.scale = config.attention_scale
        self.softcap = softcap
        self.layer = layer
        self.ops = ops

    def forward(self, hidden: Tensor, *, context: RotaryContext) -> Tensor:
        """Map (B, S, H) to (B, S, H)."""
        # (B, S, heads, D) each; heads are this rank's under tensor parallelism.
        q, k, v = self.project(hidden)
        if self.rope is not None:
            cos, sin = context.tables[self.rope]
            q, k = self.ops.rotary(q, k, cos, sin, interleaved=self.interleaved)
        # Keys are rotated before they are cached, so the cache needs no positions.
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)
        settings: dict[str, Any] = {"window": self.window, "scale": self.scale}
        if self.sinks is not None:
            settings["sinks"] = self.sinks(q)
        out = attend(self.ops, q, k, v, context, softcap=self.softcap, **settings)
        # (B, S, heads, D) -> (B, S, heads · D)
        return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries, keys and values (B, S, heads, D), before rotation."""
        q, k, v = (
            projection(hidden).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.query_key_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v


class Sinks(nn.Module):
    """Learned sink score per head, added to the softmax of every query; initialized to 0."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads))

    def forward(self, q: Tensor) -> Tensor:
        """Return the bias, (heads,), for queries (B, S, heads, D)."""
        return self.bias


def attend(
    ops: Ops,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: RotaryContext,
    *,
    softcap: float | None = None,
    **settings: Any,
) -> Tensor:
    """Compute attention of queries (B, S, heads, D) over cached and new keys and values.

    Args:
        ops: Operators.
        q: New queries.
        k: Keys of cached and new positions.
        v: Values of cached and new positions.
        context: Context of the forward pass. Under context parallelism, `q`, `k` and `v` hold this
            process's positions.
        softcap: Soft cap on the scores; None for no cap.
        settings: Other keyword arguments of the operator.
    """
    if context.cache is not None and context.cache.attend is not None:
        return context.cache.attend(q, softcap=softcap, **settings)
    operator: Callable[..., Tensor] = ops.attention
    if softcap is not None:  # not supported by fused kernels
        operator, settings["softcap"] = capped_attention, softcap
    if context.row_split is not None:
        return context.row_split.attend(operator, q, k, v, **settings)
    if torch.compiler.is_compiling():
        if context.block_masks is not None and settings.get("sinks") is None:
            mask = context.block_masks[settings["window"]]
            return attend_in_blocks(q, k, v, mask, scale=settings["scale"], softcap=softcap)
    elif context.lengths is not None:  # not when compiling: code would specialize on the lengths
        return attend_in_spans(operator, q, k, v, context.lengths, **settings)
    return operator(q, k, v, documents=context.documents, **settings)
