"""SmolLM 3 (Bakouch et al., 2025): every fourth layer without rotary positions."""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.config import above_zero, size
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.decoder_family import DecoderFamily
from ms_parallel.models.positions.window_format import layer_types, sliding_layers


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@frozen(kw_only=True)
class SmolLM3Config(DecoderConfig):
    """Configuration of SmolLM 3.

    Raises:
        ConfigError: a size is not a positive integer, or sizes are inconsistent.
    """

    model_type: str = "smollm3"
    rope_theta: float = field(default=2_000_000.0, validator=above_zero)
    no_rope_layers: tuple[int, ...] | None = field(default=None, converter=_as_tuple)
    """Per layer: 1 with rotary positions, 0 without. None: use `no_rope_layer_interval`."""
    no_rope_layer_interval: int = field(default=4, validator=size)
    """Every N-th layer has no rotary positions, unless `no_rope_layers` is set."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        flags = self.no_rope_layers
        if flags is None:
            return
        valid = isinstance(flags, tuple) and all(flag in (0, 1) for flag in flags)
        if not valid or len(flags) < self.num_hidden_layers:
            raise ConfigError(
                f"no_rope_layers must have 0 or 1 for each of {self.num_hidden_layers} layers, got"
                f" {str(flags)[:60]}"
            )

    def rope_of(self, layer: int) -> int | None:
        """Return a layer's index in `ropes`; None for a layer without rotary positions."""
        flags, interval = self.no_rope_layers, self.no_rope_layer_interval
        has_rope = (layer + 1) % interval != 0 if flags is None else flags[layer]
        return 0 if has_rope else None


class _WithoutRope:
    """Sliding window in the layers without rotary positions, unless `layer_types` is set."""

    keys = frozenset({"sliding_window", "layer_types", "use_sliding_window"})

    def read(self, config_json: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...] | None]:
        """Read the window and its layers."""
        window, count = config_json.get("sliding_window"), config_json["num_hidden_layers"]
        uses, kinds = config_json.get("use_sliding_window", False), config_json.get("layer_types")
        if type(uses) is not bool:
            raise ModelError(f"use_sliding_window must be true or false, got {repr(uses)[:60]}")
        if kinds is not None:
            layers = sliding_layers(kinds, count)
            if bool(layers) != (uses and window is not None and bool(layers)):
                raise ModelError(
                    "layer_types with sliding_attention needs a sliding_window and"
                    " use_sliding_window=true; set both, or use full_attention in all layers"
                )
        elif uses and window is not None:
            layers = tuple(layer for layer in range(count) if not _has_rope(config_json, layer))
        else:
            layers = ()
        return (window, layers) if layers else (None, None)

    def write(self, config: SmolLM3Config) -> dict[str, object]:
        """Return the window, whether it is used, and `layer_types`."""
        kinds = layer_types(config)
        return {
            "use_sliding_window": "sliding_attention" in kinds,
            "sliding_window": config.sliding_window,
            "layer_types": kinds,
        }


def _has_rope(config_json: Mapping[str, Any], layer: int) -> bool:
    flags = config_json.get("no_rope_layers")
    interval = config_json.get("no_rope_layer_interval", 4)
    try:
        return bool(flags[layer] if flags is not None else (layer + 1) % interval)
    except (TypeError, LookupError, ZeroDivisionError) as error:
        raise ModelError(
            "no_rope_layers must have 0 or 1 per layer, or no_rope_layer_interval be a positive"
            f" integer; got {str(flags)[:60]} and {str(interval)[:60]}"
        ) from error


FAMILY = DecoderFamily(
    name="smollm3",
    config=SmolLM3Config,
    transformers_class="SmolLM3ForCausalLM",
    fixed={"query_key_norm": False},
    transformers_defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
    },
    windows=_WithoutRope(),
    small={"tie_word_embeddings": True, "mlp_bias": False},
)
