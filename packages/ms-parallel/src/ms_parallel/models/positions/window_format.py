"""Sliding-window settings in config.json, in the formats of the families."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from attrs import frozen

from ms_parallel.errors import ModelError

WindowSettings = tuple[int | None, tuple[int, ...] | None]
"""`sliding_window` and `sliding_layers` of a configuration."""


class WindowConfig(Protocol):
    """Configuration properties about sliding windows."""

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""

    @property
    def sliding_window(self) -> int | None:
        """Window of the sliding layers."""

    @property
    def sliding_layers(self) -> tuple[int, ...] | None:
        """Layers with a sliding window; None for all."""

    def window(self, layer: int) -> int | None:
        """Return the window of a layer; None for full attention."""


class WindowFormat(Protocol):
    """Reader and writer of a family's window settings."""

    @property
    def keys(self) -> frozenset[str]:
        """Keys of config.json that it reads."""

    def read(self, config_json: Mapping[str, Any]) -> WindowSettings:
        """Return the window and its layers, given a config.json with the family's defaults."""

    def write(self, config: Any) -> dict[str, object]:
        """Return the window settings for config.json."""


class _NoWindow:
    keys: frozenset[str] = frozenset()

    def read(self, config_json: Mapping[str, Any]) -> WindowSettings:
        """Read no window."""
        return None, None

    def write(self, config: WindowConfig) -> dict[str, object]:
        """Return nothing to write."""
        return {}


class _AllLayers:
    keys = frozenset({"sliding_window"})

    def read(self, config_json: Mapping[str, Any]) -> WindowSettings:
        """Read the window of all layers, if any."""
        return config_json.get("sliding_window"), None

    def write(self, config: WindowConfig) -> dict[str, object]:
        """Return the window."""
        return {"sliding_window": config.sliding_window}


class _ListedLayers:
    keys = frozenset({"sliding_window", "layer_types"})

    def read(self, config_json: Mapping[str, Any]) -> WindowSettings:
        """Read the window and its layers: all, unless `layer_types` lists some."""
        # A missing key means transformers' default, null means no window.
        window = config_json.get("sliding_window", 4096)
        named = _listed_layers(config_json, window)
        return (window, None) if named is None else named

    def write(self, config: WindowConfig) -> dict[str, object]:
        """Return the window, and `layer_types` unless the window applies to all layers.

        Readers without support for `layer_types` apply the window to all layers.
        """
        document: dict[str, object] = {"sliding_window": config.sliding_window}
        if config.sliding_window is not None and config.sliding_layers is not None:
            document["layer_types"] = layer_types(config)
        return document


@frozen(kw_only=True)
class PatternLayers:
    """Sliding layers from `layer_types` or, by default, from a pattern.

    The window is always set; `sliding_layers` is None if the layers follow the pattern.
    """

    slides: Callable[[Mapping[str, Any], int], bool]
    """Whether a layer has the window by the pattern, given config.json and the layer index."""
    keys: frozenset[str] = frozenset({"sliding_window", "layer_types"})

    def read(self, config_json: Mapping[str, Any]) -> WindowSettings:
        """Read the window, and the layers if they differ from the pattern."""
        count, kinds = config_json["num_hidden_layers"], config_json.get("layer_types")
        pattern = tuple(layer for layer in range(count) if self.slides(config_json, layer))
        layers = pattern if kinds is None else sliding_layers(kinds, count)
        return config_json["sliding_window"], None if layers == pattern else layers

    def write(self, config: WindowConfig) -> dict[str, object]:
        """Return the window and `layer_types`."""
        return {"sliding_window": config.sliding_window, "layer_types": layer_types(config)}


class _UpperLayers:
    keys = frozenset({"sliding_window", "layer_types", "use_sliding_window", "max_window_layers"})

    def read(self, config_json: Mapping[str, Any]) -> WindowSettings:
        """Read window and layers: from `max_window_layers` on, unless `layer_types` lists some."""
        window, first = config_json.get("sliding_window", 4096), config_json["max_window_layers"]
        if type(first) is not int:
            raise ModelError(f"max_window_layers must be an integer, got {str(first)[:60]!r}")
        window = window if _slides(config_json) else None
        named = _listed_layers(config_json, window)
        if named is not None or window is None:
            return named or (None, None)
        return window, tuple(range(max(0, first), config_json["num_hidden_layers"]))

    def write(self, config: WindowConfig) -> dict[str, object]:
        """Return both formats; older readers apply the window from max_window_layers on."""
        kinds = layer_types(config)
        slides = [layer_type == "sliding_attention" for layer_type in kinds]
        return {
            "use_sliding_window": any(slides),
            "sliding_window": config.sliding_window,
            "max_window_layers": slides.index(True) if any(slides) else len(slides),
            "layer_types": kinds,
        }


NO_WINDOW: WindowFormat = _NoWindow()
ALL_LAYERS: WindowFormat = _AllLayers()
"""One window for all layers, as in Phi-3."""
LISTED_LAYERS: WindowFormat = _ListedLayers()
"""All layers, unless `layer_types` lists them, as in Mistral."""
UPPER_LAYERS: WindowFormat = _UpperLayers()
"""Layers from `max_window_layers` on, as in Qwen."""


def layer_types(config: WindowConfig) -> list[str]:
    """Return `layer_types` for config.json."""
    windows = map(config.window, range(config.num_hidden_layers))
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def sliding_layers(kinds: Any, count: int) -> tuple[int, ...]:
    """Return the layers with sliding attention in `layer_types`.

    Raises:
        ModelError: the value is not a list of supported types, one per layer.
    """
    supported = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != count or any(k not in supported for k in kinds):
        raise ModelError(
            "layer_types must be full_attention or sliding_attention for each of the"
            f" {count} layers, got {str(kinds)[:60]}"
        )
    return tuple(i for i, layer_type in enumerate(kinds) if layer_type == "sliding_attention")


def _listed_layers(config_json: Mapping[str, Any], window: int | None) -> WindowSettings | None:
    """Read `layer_types`; None if it is missing."""
    kinds = config_json.get("layer_types")
    if kinds is None:
        return None
    layers = sliding_layers(kinds, config_json["num_hidden_layers"])
    if layers and window is None:
        raise ModelError(
            "layer_types with sliding_attention needs a sliding_window; add it, or use"
            " full_attention in all layers"
        )
    return (window, layers) if layers else (None, None)


def _slides(config_json: Mapping[str, Any]) -> bool:
    uses = config_json.get("use_sliding_window", False)
    if type(uses) is not bool:
        raise ModelError(f"use_sliding_window must be true or false, got {repr(uses)[:60]}")
    return uses
