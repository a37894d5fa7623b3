"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values from few features.

A position's keys and values are made from one narrow vector, its queries from another; each is
normed before. Beside them all heads share one key that is turned by the position, and each has
queries for it. Values may have another width than keys.

Under a tensor-parallel split the heads are split; what is narrow is computed for each rank's part
of the sequence, and gathered. Shapes: B rows, S positions, H hidden.
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
"""Epsilon of the norms of the narrow features, whatever the other norms have."""


class LatentConfig(Protocol):
    """What is asked of a configuration."""

    @property
    def hidden_size(self) -> int:
        """H."""

    @property
    def num_attention_heads(self) -> int:
        """Heads."""

    @property
    def attention_bias(self) -> bool:
        """Whether what makes narrow features has a bias, and the output."""

    @property
    def q_lora_rank(self) -> int | None:
        """Features that queries are made from; None for the hidden state itself."""

    @property
    def kv_lora_rank(self) -> int:
        """Features that keys and values are made from."""

    @property
    def qk_nope_head_dim(self) -> int:
        """Dims of a head's queries and keys that do not turn."""

    @property
    def qk_rope_head_dim(self) -> int:
        """Dims that turn; their keys are the same for all heads."""

    @property
    def v_head_dim(self) -> int:
        """Dims of a head's values."""

    @property
    def attention_scale(self) -> float | None:
        """What scores are multiplied by."""

    @property
    def rotary_interleaved(self) -> bool:
        """Whether neighbouring dims turn together, instead of halves."""


class LatentAttention(nn.Module):
    """Attention whose keys and values are made from few features.

    Args:
        config: The model.
        layer: Global number of the layer.
        ops: Operators.
    """

    def __init__(self, config: LatentConfig, layer: int, ops: Ops) -> None:
        super().__init__()
        hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
        self.widths = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        plain, turned, value = self.widths
        bias = config.attention_bias
        if rank is None:
            self.q_proj = nn.Linear(hidden, heads * (plain + turned), bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, rank, bias=bias)
            self.q_a_layernorm = RMSNorm(rank, NORM_EPS, ops)
            self.q_b_proj = nn.Linear(rank, heads * (plain + turned), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.kv_lora_rank + turned, bias=bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, NORM_EPS, ops)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, heads * (plain + value), bias=False)
        self.o_proj = nn.Linear(heads * value, hidden, bias=bias)
        self.scale = config.attention_scale
        self.interleaved = config.rotary_interleaved
        self.layer = layer
        self.ops = ops
        self.whole: Callable[[Tensor], Tensor] = lambda part: part
        """All positions (B, S, ...) of those that this process has (B, part of S, ...)."""

    def forward(self, hidden: Tensor, *, context: RotaryContext) -> Tensor:
        """Map (B, S, H) to (B, S, H)."""
        plain, turned, value = self.widths
        if hasattr(self, "q_proj"):
            q = self.q_proj(hidden)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        q_plain, q_turned = q.unflatten(-1, (-1, plain + turned)).split((plain, turned), -1)
        narrow, shared = self.kv_a_proj_with_mqa(hidden).split(
            (self.kv_a_layernorm.weight.shape[0], turned), -1
        )
        made = self.kv_b_proj(self.kv_a_layernorm(narrow)).unflatten(-1, (-1, plain + value))
        k_plain, v = made.split((plain, value), -1)  # (B, S, heads, ...)
        cos, sin = context.tables[0]
        key = self.whole(shared).unsqueeze(2)  # (B, S, 1, turned)
        q_turned, key = self.ops.rotary(q_turned, key, cos, sin, interleaved=self.interleaved)
        q = torch.cat((q_plain, q_turned), -1)
        k = torch.cat((k_plain, key.expand(-1, -1, k_plain.shape[2], -1)), -1)
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)
        out = attend(self.ops, q, k, v, context, scale=self.scale)
        return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]


def styles(config: LatentConfig) -> dict[str, Style | None]:
    """Return how the tensor axis splits latent attention, by the names of modules in a block."""
    narrow = () if config.q_lora_rank is None else ("q_a_proj", "q_a_layernorm")
    heads = "q_proj" if config.q_lora_rank is None else "q_b_proj"
    return {
        "self_attn.q_proj": None,
        "self_attn.k_proj": None,
        "self_attn.v_proj": None,
        **{f"self_attn.{name}": "sequence" for name in narrow},
        "self_attn.kv_a_proj_with_mqa": "sequence",
        "self_attn.kv_a_layernorm": "sequence",
        f"self_attn.{heads}": "gathering_column",
        "self_attn.kv_b_proj": "gathering_column",
    }
