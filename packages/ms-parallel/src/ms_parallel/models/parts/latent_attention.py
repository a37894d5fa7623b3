"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

Keys and values of a position are projected from one normalized low-rank latent, and queries from
another. Every head also has rotary query dims, which attend to a rotary key shared by all heads.
Values may differ from keys in width.

Tensor parallelism splits the heads; the latents are computed from each rank's part of the sequence
and then gathered. Shapes: B rows, S positions, H hidden.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from ms_parallel.models.parts.attention import RotaryContext, attend
from ms_parallel.models.parts.norm import RMSNorm
from ms_parallel.models.plan import Style
from ms_parallel.operators.protocol import Ops

NORM_EPS = 1e-6
"""Epsilon of the latent norms, independent of the model's `rms_norm_eps`."""


class LatentConfig(Protocol):
    """Configuration fields that latent attention needs."""

    @property
    def hidden_size(self) -> int:
        """Hidden size H."""

    @property
    def num_attention_heads(self) -> int:
        """Number of attention heads."""

    @property
    def attention_bias(self) -> bool:
        """Whether the latent projections and the output projection have a bias."""

    @property
    def q_lora_rank(self) -> int | None:
        """Rank of the query latent; None to project queries from the hidden state directly."""

    @property
    def kv_lora_rank(self) -> int:
        """Rank of the key-value latent."""

    @property
    def qk_nope_head_dim(self) -> int:
        """Query and key dims per head without rotary positions."""

    @property
    def qk_rope_head_dim(self) -> int:
        """Query and key dims per head with rotary positions; heads share these keys."""

    @property
    def v_head_dim(self) -> int:
        """Value dims per head."""

    @property
    def attention_scale(self) -> float | None:
        """Factor on the scores."""

    @property
    def rotary_interleaved(self) -> bool:
        """Whether rotation pairs adjacent dims instead of halves."""


class LatentAttention(nn.Module):
    """Attention with low-rank keys and values.

    Args:
        config: Model configuration.
        layer: Global layer index.
        ops: Operators.
    """

    def __init__(self, config: LatentConfig, layer: int, ops: Ops) -> None:
        super().__init__()
        hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
        self.widths = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        nope, rope, value = self.widths
        bias = config.attention_bias
        if rank is None:
            self.q_proj = nn.Linear(hidden, heads * (nope + rope), bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, rank, bias=bias)
            self.q_a_layernorm = RMSNorm(rank, NORM_EPS, ops)
            self.q_b_proj = nn.Linear(rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.kv_lora_rank + rope, bias=bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, NORM_EPS, ops)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, heads * (nope + value), bias=False)
        self.o_proj = nn.Linear(heads * value, hidden, bias=bias)
        self.scale = config.attention_scale
        self.interleaved = config.rotary_interleaved
        self.layer = layer
        self.ops = ops
        self.gather_sequence: Callable[[Tensor], Tensor] = lambda part: part
        """Gathers all positions (B, S, ...) from this process's (B, part of S, ...)."""

    def forward(self, hidden: Tensor, *, context: RotaryContext) -> Tensor:
        """Map (B, S, H) to (B, S, H)."""
        nope, rope, value = self.widths
        if hasattr(self, "q_proj"):
            q = self.q_proj(hidden)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        # (B, S, heads, nope) and (B, S, heads, rope)
        q_nope, q_rope = q.unflatten(-1, (-1, nope + rope)).split((nope, rope), -1)
        # The latent gives keys and values; `shared` is the rotary key of all heads.
        latent, shared = self.kv_a_proj_with_mqa(hidden).split(
            (self.kv_a_layernorm.weight.shape[0], rope), -1
        )
        # (B, S, rank) -> (B, S, heads, nope + value)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, nope + value))
        k_nope, v = expanded.split((nope, value), -1)  # (B, S, heads, ...)
        cos, sin = context.tables[0]
        key = self.gather_sequence(shared).unsqueeze(2)  # (B, S, 1, rope)
        q_rope, key = self.ops.rotary(q_rope, key, cos, sin, interleaved=self.interleaved)
        q = torch.cat((q_nope, q_rope), -1)  # (B, S, heads, nope + rope)
        k = torch.cat((k_nope, key.expand(-1, -1, k_nope.shape[2], -1)), -1)
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)
        out = attend(self.ops, q, k, v, context, scale=self.scale)
        return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]


def styles(config: LatentConfig) -> dict[str, Style | None]:
    """Return tensor-parallel styles of latent attention by module name within a block."""
    query_latent = () if config.q_lora_rank is None else ("q_a_proj", "q_a_layernorm")
    query_proj = "q_proj" if config.q_lora_rank is None else "q_b_proj"
    return {
        "self_attn.q_proj": None,
        "self_attn.k_proj": None,
        "self_attn.v_proj": None,
        **{f"self_attn.{name}": "sequence" for name in query_latent},
        "self_attn.kv_a_proj_with_mqa": "sequence",
        "self_attn.kv_a_layernorm": "sequence",
        f"self_attn.{query_proj}": "gathering_column",
        "self_attn.kv_b_proj": "gathering_column",
    }
