"""SmolLM 3 (Bakouch et al., 2025): every fourth layer without rotary positions."""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.config import above_zero, size
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.dense import DenseFamily
from ms_parallel.models.positions.windows import layer_types, sliding_layers


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@frozen(kw_only=True)
class SmolLM3Config(DecoderConfig):
    """A SmolLM 3.

    Raises:
        ConfigError: a size is not a whole number of at least 1, or sizes do not fit one another.
    """

    model_type: str = "smollm3"
    rope_theta: float = field(default=2_000_000.0, validator=above_zero)
    no_rope_layers: tuple[int, ...] | None = field(default=None, converter=_as_tuple)
    """Per layer: 1 with rotary positions, 0 without. None: by `no_rope_layer_interval`."""
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
                f"no_rope_layers is {str(flags)[:60]}; give 0 or 1 for each of"
                f" {self.num_hidden_layers} layers"
            )

    def rope_of(self, layer: int) -> int | None:
        """Return a layer's index in `ropes`; None for a layer without rotary positions."""
        flags, interval = self.no_rope_layers, self.no_rope_layer_interval
        has_rope = (layer + 1) % interval != 0 if flags is None else flags[layer]
        return 0 if has_rope else None


class _WithoutRope:
    """Layers without rotary positions slide, unless `layer_types` says otherwise."""

    keys = frozenset({"sliding_window", "layer_types", "use_sliding_window"})

    def read(self, config_json: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...] | None]:
        """Read the window and the layers that slide."""
        window, count = config_json.get("sliding_window"), config_json["num_hidden_layers"]
        uses, kinds = config_json.get("use_sliding_window", False), config_json.get("layer_types")
        if type(uses) is not bool:
            raise ModelError(f"use_sliding_window is {repr(uses)[:60]}; give true or false")
        if kinds is not None:
            layers = sliding_layers(kinds, count)
            if bool(layers) != (uses and window is not None and bool(layers)):
                raise ModelError(
                    "layer_types has sliding_attention, but there is no sliding_window, or"
                    " use_sliding_window is false; give full_attention for each layer, or a window"
                )
        elif uses and window is not None:
            layers = tuple(layer for layer in range(count) if not _turns(config_json, layer))
        else:
            layers = ()
        return (window, layers) if layers else (None, None)

    def write(self, config: SmolLM3Config) -> dict[str, object]:
        """Return the window, whether it is used, and the type of each layer by name."""
        kinds = layer_types(config)
        return {
            "use_sliding_window": "sliding_attention" in kinds,
            "sliding_window": config.sliding_window,
            "layer_types": kinds,
        }


def _turns(config_json: Mapping[str, Any], layer: int) -> bool:
    listed, interval = (
        config_json.get("no_rope_layers"),
        config_json.get("no_rope_layer_interval", 4),
    )
    try:
        return bool(listed[layer] if listed is not None else (layer + 1) % interval)
    except (TypeError, LookupError, ZeroDivisionError) as error:
        raise ModelError(
            f"no_rope_layers={str(listed)[:60]} with no_rope_layer_interval={str(interval)[:60]}"
            " does not say which layers turn; give 0 or 1 for each"
        ) from error


FAMILY = DenseFamily(
    name="smollm3",
    config=SmolLM3Config,
    transformers_class="SmolLM3ForCausalLM",
    fixed={"query_key_norm": False},
    silent={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
    },
    windows=_WithoutRope(),
    small={"tie_word_embeddings": True, "mlp_bias": False},
)
