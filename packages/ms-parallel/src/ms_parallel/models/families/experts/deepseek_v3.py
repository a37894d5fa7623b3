"""DeepSeek-V3 (DeepSeek-AI, 2024, arXiv:2412.19437): latent attention and mixtures of experts."""

import math
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen
from torch import nn

from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.config import above_zero, size
from ms_parallel.models.decoder import plan_with
from ms_parallel.models.decoder_family import DecoderFamily
from ms_parallel.models.experts.deepseek import (
    ALIASES,
    MODULES,
    NEUTRAL,
    DeepseekMoEConfig,
    block,
)
from ms_parallel.models.experts.mixture import weight_rules
from ms_parallel.models.parts.latent_attention import LatentAttention, styles
from ms_parallel.models.parts.mtp import with_mtp_layers
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.positions.rope_format import SHARED_ROPE
from ms_parallel.operators.protocol import Ops
from ms_parallel.settings import flag, integer


@frozen(kw_only=True)
class DeepseekV3Config(DeepseekMoEConfig):
    """Configuration of DeepSeek-V3. `head_dim` is always `qk_rope_head_dim`.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    q_lora_rank: int | None = field(default=1536, validator=integer(maximum=1 << 20, optional=True))
    """Rank of the query latent; None to project queries from the hidden state directly."""
    kv_lora_rank: int = field(default=512, validator=size)
    """Rank of the key-value latent."""
    qk_nope_head_dim: int = field(default=128, validator=size)
    """Query and key dims per head without rotary positions."""
    qk_rope_head_dim: int = field(default=64, validator=size)
    """Query and key dims per head with rotary positions; heads share these keys."""
    v_head_dim: int = field(default=128, validator=size)
    """Value dims per head."""
    rope_interleave: bool = field(default=True, validator=flag)
    """Rotation pairs adjacent dims instead of halves."""
    n_group: int = field(default=8, validator=size)
    topk_group: int = field(default=4, validator=size)
    routed_scaling_factor: float = field(default=2.5, validator=above_zero)
    first_k_dense_replace: int = field(default=3, validator=integer(minimum=0))

    def __attrs_post_init__(self) -> None:
        # The rotary tables cover these dims only.
        object.__setattr__(self, "head_dim", self.qk_rope_head_dim)
        super().__attrs_post_init__()
        if self.num_key_value_heads != self.num_attention_heads:
            raise ConfigError(
                "num_key_value_heads must equal num_attention_heads="
                f"{self.num_attention_heads} in latent attention, got {self.num_key_value_heads}"
            )

    @property
    def attention_scale(self) -> float:
        """Factor on the attention scores; larger with YaRN, by its `mscale_all_dim`."""
        scaling = self.rope_scaling
        scale = 1 / math.sqrt(self.qk_nope_head_dim + self.qk_rope_head_dim)
        if scaling is None or not scaling.mscale_all_dim:
            return scale
        original = scaling.original_max_position_embeddings
        factor = scaling.factor or self.max_position_embeddings / original
        # Squared, since the factor applies to queries and to keys.
        return scale * (0.1 * scaling.mscale_all_dim * math.log(max(factor, 1.0)) + 1.0) ** 2

    @property
    def rotary_interleaved(self) -> bool:
        """Whether rotation pairs adjacent dims instead of halves."""
        return self.rope_interleave


def _block(config: DeepseekV3Config, layer: int, ops: Ops) -> nn.Module:
    attention = LatentAttention(config, layer, ops)
    return block(config, layer, ops, attention=attention)


def _plan(config: DeepseekV3Config) -> ModelPlan:
    return with_mtp_layers(plan_with(config, modules={**styles(config), **MODULES}), config)


class _RedundantWidths:
    """Llama's format, plus redundant head widths that newer files contain."""

    keys = frozenset({"qk_head_dim"})

    def read(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
        """Read base and scaling; check the head widths for consistency."""
        nope_dim: Any = config_json.get("qk_nope_head_dim")
        rope: Any = config_json.get("qk_rope_head_dim")
        if isinstance(nope_dim, int) and isinstance(rope, int):
            formula = "qk_nope_head_dim + qk_rope_head_dim"
            _check_width(config_json, "qk_head_dim", nope_dim + rope, formula)
            _check_width(config_json, "head_dim", rope, "qk_rope_head_dim")
        return SHARED_ROPE.read(config_json)

    def write(self, config: DeepseekV3Config) -> dict[str, object]:
        """Return the settings in the old format, which all versions of transformers read."""
        return SHARED_ROPE.write(config)


def _check_width(config_json: Mapping[str, Any], name: str, width: int, formula: str) -> None:
    value = config_json.get(name)
    if value is not None and value != width:
        raise ModelError(
            f"{name} must be {width} ({formula}), got {repr(value)[:60]}; remove it or correct it"
        )


FAMILY = DecoderFamily(
    name="deepseek_v3",
    config=DeepseekV3Config,
    block=_block,
    plan=_plan,
    weights=lambda _: weight_rules(),
    layer_kind=DeepseekV3Config.has_experts,
    transformers_class="DeepseekV3ForCausalLM",
    fixed={"mlp_bias": False, "query_key_norm": False},
    aliases=ALIASES,
    transformers_defaults={"max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1},
    neutral=NEUTRAL,
    positions=_RedundantWidths(),
    small={
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 176,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
)
