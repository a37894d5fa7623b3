"""Gemma 3, its text models (Gemma team, 2025, arXiv:2503.19786): five windows to one full layer."""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from ms_parallel.errors import ModelError
from ms_parallel.models.config import above_zero, size
from ms_parallel.models.dense import DenseFamily
from ms_parallel.models.families.dense.gemma2 import GemmaConfig, gemma_block, gemma_plan
from ms_parallel.models.parts.norm import UnitOffsetNorm
from ms_parallel.models.positions.document import chosen_rope, read_rope, write_scaling
from ms_parallel.models.positions.scaling import Rope
from ms_parallel.models.positions.windows import ByPattern

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


@frozen(kw_only=True)
class Gemma3Config(GemmaConfig):
    """A Gemma 3; full layers turn by `rope_theta`, sliding ones by a base of their own.

    Raises:
        ConfigError: a size is not a whole number of at least 1, or sizes do not fit one another.
    """

    model_type: str = "gemma3_text"
    rope_theta: float = field(default=1_000_000.0, validator=above_zero)
    rope_local_base_freq: float = field(default=10_000.0, validator=above_zero)
    """Base of the rotary frequencies of sliding layers, which no scaling stretches."""
    sliding_window_pattern: int = field(default=6, validator=size)
    """Each so many-th layer is a full one, where `sliding_layers` does not say otherwise."""

    def window(self, layer: int) -> int | None:
        """Return the window of one layer, None where it sees everything before."""
        chosen = self.sliding_layers
        slides = (layer + 1) % self.sliding_window_pattern if chosen is None else layer in chosen
        return self.sliding_window if slides else None

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Rotary settings of full and of sliding layers."""
        local = Rope(
            theta=self.rope_local_base_freq,
            width=self.rotary_width,
            max_position_embeddings=self.max_position_embeddings,
        )
        return (*super().ropes, local)

    def rope_of(self, layer: int) -> int:
        """Return the index in `ropes` of what one layer uses."""
        return 0 if self.window(layer) is None else 1


def _pattern(config_json: Mapping[str, Any]) -> int:
    pattern = config_json.get("sliding_window_pattern", 6)
    if type(pattern) is not int or pattern < 1:
        shown = repr(pattern)[:60]
        raise ModelError(f"sliding_window_pattern is {shown}; give a whole number of at least 1")
    return pattern


class _GlobalAndLocal:
    keys = frozenset({"rope_local_base_freq"})

    def read(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
        """Read both bases and the scaling of the full layers, from either spelling."""
        if config_json.get("rope_parameters") and config_json.get("rope_scaling"):
            raise ModelError("config.json has both rope_parameters and rope_scaling; keep one")
        new: Any = config_json.get("rope_parameters") or {}
        if not isinstance(new, dict) or set(new) - {_GLOBAL, _LOCAL}:
            raise ModelError(
                f"rope_parameters={str(new)[:60]} is not supported; give {_GLOBAL} and {_LOCAL},"
                " each with its own"
            )
        of_full = new.get(_GLOBAL) or chosen_rope({**config_json, "rope_parameters": None})
        of_sliding = new.get(_LOCAL) or {}
        for rope in (of_full, of_sliding):
            if not isinstance(rope, dict) or rope.get("partial_rotary_factor", 1.0) != 1.0:
                raise ModelError(f"rotary settings {str(rope)[:60]} are not supported")
        theta, scaling = read_rope(of_full, config_json["rope_theta"])
        local, stretched = read_rope(of_sliding, config_json["rope_local_base_freq"])
        if stretched is not None:
            raise ModelError(
                f"rope_type {stretched.kind!r} of {_LOCAL} is not supported; only 'default' is"
            )
        return {"rope_theta": theta, "rope_scaling": scaling, "rope_local_base_freq": local}

    def write(self, config: Gemma3Config) -> dict[str, object]:
        """Return the old spelling of positions, which all versions of readers know."""
        return {
            "rope_theta": config.rope_theta,
            "rope_local_base_freq": config.rope_local_base_freq,
            "rope_scaling": write_scaling(config.rope_scaling),
        }


FAMILY = DenseFamily(
    name="gemma3_text",
    config=Gemma3Config,
    block=gemma_block,
    norm=UnitOffsetNorm,
    plan=gemma_plan,
    transformers_class="Gemma3ForCausalLM",
    fixed={"mlp_bias": False, "query_key_norm": True},
    null_key_heads=False,
    silent={
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
    windows=ByPattern(
        slides=lambda config_json, layer: bool((layer + 1) % _pattern(config_json)),
        # The last is what transformers notes of a pattern beside the types of layers.
        keys=frozenset({"sliding_window", "layer_types", "_sliding_window_pattern"}),
    ),
    whole_heads=True,
    small={"tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 512},
)
