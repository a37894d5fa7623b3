"""Gemma 3 text models (Gemma Team, 2025, arXiv:2503.19786): five sliding layers per full one."""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from ms_parallel.errors import ModelError
from ms_parallel.models.config import above_zero, size
from ms_parallel.models.decoder_family import DecoderFamily
from ms_parallel.models.families.dense.gemma2 import GemmaConfig, gemma_block, gemma_plan
from ms_parallel.models.parts.norm import UnitOffsetNorm
from ms_parallel.models.positions.rope_format import read_rope, rope_section, write_scaling
from ms_parallel.models.positions.scaling import Rope
from ms_parallel.models.positions.window_format import PatternLayers

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


@frozen(kw_only=True)
class Gemma3Config(GemmaConfig):
    """Configuration of Gemma 3. Full-attention and sliding layers have different rotary bases.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    model_type: str = "gemma3_text"
    rope_theta: float = field(default=1_000_000.0, validator=above_zero)
    rope_local_base_freq: float = field(default=10_000.0, validator=above_zero)
    """Rotary base of sliding layers, to which `rope_scaling` does not apply."""
    sliding_window_pattern: int = field(default=6, validator=size)
    """Every N-th layer has full attention, unless `sliding_layers` is set."""

    def window(self, layer: int) -> int | None:
        """Return the attention window of a layer; None for full attention."""
        layers = self.sliding_layers
        slides = (layer + 1) % self.sliding_window_pattern if layers is None else layer in layers
        return self.sliding_window if slides else None

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Rotary embeddings of full-attention layers, then of sliding layers."""
        # Sliding layers see short distances only, so their frequencies are not scaled.
        local = Rope(
            theta=self.rope_local_base_freq,
            width=self.rotary_width,
            max_position_embeddings=self.max_position_embeddings,
        )
        return (*super().ropes, local)

    def rope_of(self, layer: int) -> int:
        """Return a layer's index into `ropes`."""
        return 0 if self.window(layer) is None else 1


def _pattern(config_json: Mapping[str, Any]) -> int:
    pattern = config_json.get("sliding_window_pattern", 6)
    if type(pattern) is not int or pattern < 1:
        shown = repr(pattern)[:60]
        raise ModelError(f"sliding_window_pattern must be an integer of at least 1, got {shown}")
    return pattern


class _GlobalAndLocal:
    """Rotary settings of full-attention and sliding layers."""

    keys = frozenset({"rope_local_base_freq"})

    def read(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
        """Read both bases, and the scaling of full-attention layers, in either format."""
        if config_json.get("rope_parameters") and config_json.get("rope_scaling"):
            raise ModelError("config.json has both rope_parameters and rope_scaling; remove one")
        new: Any = config_json.get("rope_parameters") or {}
        if isinstance(new, dict):
            # Some versions of transformers add these defaults of models with one rotary embedding.
            unused = {"rope_type": "default", "rope_theta": None}
            new = {k: v for k, v in new.items() if k not in unused or v != unused[k]}
        if not isinstance(new, dict) or set(new) - {_GLOBAL, _LOCAL}:
            raise ModelError(
                f"rope_parameters must be a mapping with the keys {_GLOBAL} and {_LOCAL}, got"
                f" {str(new)[:60]}"
            )
        full_rope = new.get(_GLOBAL) or rope_section({**config_json, "rope_parameters": None})
        sliding_rope = new.get(_LOCAL) or {}
        for rope in (full_rope, sliding_rope):
            if not isinstance(rope, dict) or rope.get("partial_rotary_factor", 1.0) != 1.0:
                raise ModelError(f"rotary settings {str(rope)[:60]} are not supported")
        theta, scaling = read_rope(full_rope, config_json["rope_theta"])
        local_theta, local_scaling = read_rope(sliding_rope, config_json["rope_local_base_freq"])
        if local_scaling is not None:
            raise ModelError(f"rope_type of {_LOCAL} must be 'default', got {local_scaling.kind!r}")
        return {"rope_theta": theta, "rope_scaling": scaling, "rope_local_base_freq": local_theta}

    def write(self, config: Gemma3Config) -> dict[str, object]:
        """Return the settings in the old format, which all versions of transformers read."""
        return {
            "rope_theta": config.rope_theta,
            "rope_local_base_freq": config.rope_local_base_freq,
            "rope_scaling": write_scaling(config.rope_scaling),
        }


FAMILY = DecoderFamily(
    name="gemma3_text",
    config=Gemma3Config,
    block=gemma_block,
    norm=UnitOffsetNorm,
    plan=gemma_plan,
    transformers_class="Gemma3ForCausalLM",
    fixed={"mlp_bias": False, "query_key_norm": True},
    null_key_heads=False,
    transformers_defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    neutral={
        "hidden_act": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (False, None),
        "cache_implementation": ("hybrid", None),
    },
    activation={"hidden_activation": "gelu_pytorch_tanh"},
    positions=_GlobalAndLocal(),
    windows=PatternLayers(
        # Every N-th layer has full attention.
        slides=lambda config_json, layer: bool((layer + 1) % _pattern(config_json)),
        # transformers writes `_sliding_window_pattern` in addition to `layer_types`.
        keys=frozenset({"sliding_window", "layer_types", "_sliding_window_pattern"}),
    ),
    heads_divide_hidden=True,
    small={"tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 512},
)
