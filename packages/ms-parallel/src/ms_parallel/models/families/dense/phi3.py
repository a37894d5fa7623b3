"""Phi-3 and Phi-4-mini (Abdin et al., 2024, arXiv:2404.14219): fused projections, LongRoPE."""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.config import size
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.decoder_family import DecoderFamily
from ms_parallel.models.families.dense.glm4 import fused_gate_up_rules
from ms_parallel.models.positions.rope_format import SharedRope, rope_section
from ms_parallel.models.positions.window_format import ALL_LAYERS
from ms_parallel.models.weight_names import WeightRules, rows_of
from ms_parallel.settings import number

_OLD_NAMES = ("su", "yarn")
"""Names of longrope in the first published files."""


@frozen(kw_only=True)
class Phi3Config(DecoderConfig):
    """Configuration of Phi-3.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    model_type: str = "phi3"
    original_max_position_embeddings: int = field(default=4096, validator=size)
    """Context length of the first pre-training phase; longer sequences use the long factors."""
    partial_rotary_factor: float = field(default=1.0, validator=number(minimum=1e-3, maximum=1.0))
    """Fraction of the head dims that are rotated."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        scaling, original = self.rope_scaling, self.original_max_position_embeddings
        if scaling is None:
            return
        if scaling.kind != "longrope" or scaling.original_max_position_embeddings != original:
            raise ConfigError(
                f"rope_scaling of model_type 'phi3' must be 'longrope' with"
                f" original_max_position_embeddings={original}, got {scaling.kind!r} with"
                f" {scaling.original_max_position_embeddings}"
            )

    @property
    def rotary_width(self) -> int:
        """Number of rotated dims per head."""
        return int(self.head_dim * self.partial_rotary_factor)


class _LongRope(SharedRope):
    """LongRoPE with the original context length at the top level, and older names of its kind."""

    def read(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
        """Read base, scaling and partial_rotary_factor."""
        rope = dict(rope_section(config_json))
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        rope |= {"rope_type": "longrope" if kind in _OLD_NAMES else kind}
        if rope["rope_type"] not in ("default", "longrope"):
            shown = repr(kind)[:60]
            raise ModelError(f"rope_type must be 'default' or 'longrope', got {shown}")
        rope["original_max_position_embeddings"] = config_json["original_max_position_embeddings"]
        return super().read({**config_json, "rope_parameters": rope, "rope_scaling": None})


def _weights(config: Phi3Config) -> WeightRules:
    fused = "model.layers.{0}.self_attn.qkv_proj.weight"
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    # Rows of the fused weight: queries, keys, values.
    starts = {"q_proj": 0, "k_proj": queries, "v_proj": queries + keys}
    return {
        f"model.layers.*.self_attn.{name}.weight": rows_of(fused, start, queries + 2 * keys)
        for name, start in starts.items()
    } | dict(fused_gate_up_rules(config))


FAMILY = DecoderFamily(
    name="phi3",
    config=Phi3Config,
    weights=_weights,
    transformers_class="Phi3ForCausalLM",
    fixed={"attention_bias": False, "mlp_bias": False, "query_key_norm": False},
    transformers_defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    neutral={"resid_pdrop": (0,), "embd_pdrop": (0,)},
    positions=_LongRope(partial=True),
    windows=ALL_LAYERS,
)
