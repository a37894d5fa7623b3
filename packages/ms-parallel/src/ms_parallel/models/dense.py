"""Families of dense decoders: how one's config.json is read and written, as data."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import torch
from attrs import field, frozen
from torch import nn

from ms_parallel import operators
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.config import MOST, TOKENS, token_ids
from ms_parallel.models.config_keys import check_keys
from ms_parallel.models.decoder import Block, Decoder, plan
from ms_parallel.models.decoder_config import DecoderConfig, RopeScaling
from ms_parallel.models.family import Family, families
from ms_parallel.models.plan import ModelPlan
from ms_parallel.operators import Ops

__all__ = ["DenseFamily"]

_SMALL: Mapping[str, object] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_COPIED = (
    *_SIZES,
    "rms_norm_eps",
    "tie_word_embeddings",
    "max_position_embeddings",
    "initializer_range",
)
_BIASES = ("attention_bias", "mlp_bias")
_WINDOW_KEYS: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "every_layer": frozenset({"sliding_window", "layer_types"}),
    "upper_layers": frozenset(
        {"sliding_window", "layer_types", "use_sliding_window", "max_window_layers"}
    ),
}
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ROPE = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *_LLAMA3}


@frozen(kw_only=True)
class DenseFamily(Family):
    """A family of decoders whose weights bear Hugging Face's names."""

    config: type[DecoderConfig] = DecoderConfig
    """The class of its configurations."""
    model: Callable[..., nn.Module] = Decoder
    """Builds the model."""
    plan: Callable[[DecoderConfig], ModelPlan] = plan
    """How the model may be split."""
    block: Callable[[DecoderConfig, int, Ops], nn.Module] = Block
    """Builds the block of a layer's global number."""
    transformers_class: str
    """What transformers builds of its config.json."""
    fixed: Mapping[str, object]
    """Settings of `DecoderConfig` that its files cannot vary, with the value that they have."""
    silent: Mapping[str, object]
    """What transformers takes where its config.json is silent."""
    neutral: Mapping[str, tuple[object, ...]] = field(factory=dict)
    """Keys of its config.json that are not read, with the values that change nothing."""
    windows: Literal["none", "every_layer", "upper_layers"] = "none"
    """Which layers its `sliding_window` applies to where no `layer_types` says so."""
    null_head_dim: bool = False
    """Whether a `head_dim` of null is a head's share of the hidden size."""
    output_bias: bool = True
    """Whether attention's output projection has a bias where its inputs have one."""
    whole_heads: bool = False
    """Whether transformers wants the hidden size to be a multiple of the heads."""

    @property
    def default(self) -> Mapping[str, object]:
        """Settings of a small model: those of all, the fixed ones, and its own."""
        return {**_SMALL, **self.fixed, **self.small, "model_type": self.name}

    def build(self, config: DecoderConfig, *, ops: Ops | None = None, **part: Any) -> nn.Module:
        """The model or one stage of it, with unset weights."""
        return self.model(config, ops=ops or operators, block=self.block, **part)

    def check(self, config: DecoderConfig) -> None:
        """Refuse settings that its config.json cannot express.

        Raises:
            ConfigError: names the setting, and the families that have it.
        """
        for name, value in self.fixed.items():
            found = getattr(config, name)
            if found != value:
                raise ConfigError(
                    f"model_type {self.name!r} has no {name}={found}; choose model_type"
                    f" {_families_with(name, found)}"
                )
        if self.whole_heads and config.hidden_size % config.num_attention_heads:
            others = [one.name for one in _dense() if not one.whole_heads]
            raise ConfigError(
                f"hidden_size={config.hidden_size} is not a multiple of num_attention_heads="
                f"{config.num_attention_heads}, as transformers wants it of {self.name}; choose a"
                f" multiple, or model_type {', '.join(others[:-1])} or {others[-1]}"
            )

    def read(self, document: Mapping[str, Any]) -> DecoderConfig:
        """Understand a config.json, decoded.

        Raises:
            ModelError: a setting is missing, or asks for something that the decoder does not do.
            ConfigError: a value is out of range.
        """
        free = [name for name in _BIASES if name not in self.fixed]
        biases = {name: (self.fixed[name],) for name in _BIASES if name in self.fixed}
        neutral = {**biases, **self.neutral}
        check_keys(self.name, _WINDOW_KEYS[self.windows].union(free), neutral, document)
        _check_sizes(document)
        # Where a key is null, its default does not count: null is a value of its own, or refused.
        given = {**self.silent, **document}
        window, layers = self._window(given)
        theta, scaling = _rope(given)
        heads = given.get("num_key_value_heads")
        chosen: dict[str, object] = {name: given.get(name, False) for name in free}
        chosen |= {"sliding_window": window, "sliding_layers": layers}
        return DecoderConfig(
            model_type=self.name,
            num_key_value_heads=given["num_attention_heads"] if heads is None else heads,
            head_dim=self._head_dim(given),
            rope_theta=theta,
            rope_scaling=scaling,
            **cast(Any, {**chosen, **self.fixed}),
            **{name: given[name] for name in _COPIED if name in given},
            **{name: token_ids(name, given.get(name)) for name in TOKENS},
        )

    def write(self, config: DecoderConfig, dtype: torch.dtype) -> dict[str, object]:
        """The config.json, in the spelling that all versions of readers know."""
        names = (*_COPIED, *TOKENS, "num_key_value_heads", "head_dim", "rope_theta")
        free = [name for name in _BIASES if name not in self.fixed]
        return {
            "architectures": [self.transformers_class],
            "model_type": self.name,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "torch_dtype": str(dtype).removeprefix("torch."),
            "use_cache": True,
            **{name: getattr(config, name) for name in names},
            "rope_scaling": _rope_document(config),
            **{name: getattr(config, name) for name in free},
            **self._window_document(config),
        }

    def _head_dim(self, given: Mapping[str, Any]) -> Any:
        """The width that is given, or a head's share of the hidden size where that is allowed."""
        if "head_dim" in given and not (given["head_dim"] is None and self.null_head_dim):
            return given["head_dim"]
        return given["hidden_size"] // given["num_attention_heads"]

    def _window(self, given: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...] | None]:
        """The sliding window and the layers that it applies to."""
        if self.windows == "none":
            return None, None
        window, count = given.get("sliding_window", 4096), given["num_hidden_layers"]
        if self.windows == "upper_layers":
            first = given["max_window_layers"]
            if type(first) is not int:
                raise ModelError(f"max_window_layers is {str(first)[:60]!r}; give a whole number")
            window = window if _slides(given) else None
        kinds = given.get("layer_types")
        if kinds is not None:
            layers = _sliding_layers(kinds, count)
            if layers and window is None:
                raise ModelError(
                    "layer_types has sliding_attention, but there is no sliding_window; give one,"
                    " or full_attention for each layer"
                )
            return (window, layers) if layers else (None, None)
        if window is None or self.windows == "every_layer":
            return window, None
        return window, tuple(range(max(0, given["max_window_layers"]), count))

    def _window_document(self, config: DecoderConfig) -> dict[str, object]:
        if self.windows == "none":
            return {}
        kinds = _layer_types(config)
        if self.windows == "every_layer":
            document: dict[str, object] = {"sliding_window": config.sliding_window}
            # Named only where layers differ: who knows no layer_types lets all of them slide.
            if config.sliding_window is not None and config.sliding_layers is not None:
                document["layer_types"] = kinds
            return document
        slides = [kind == "sliding_attention" for kind in kinds]
        return {
            "use_sliding_window": any(slides),
            "sliding_window": config.sliding_window,
            # Older readers know no layer_types: to them all layers from this one on slide.
            "max_window_layers": slides.index(True) if any(slides) else len(slides),
            "layer_types": kinds,
        }


def _dense() -> list[DenseFamily]:
    return [family for family in families() if isinstance(family, DenseFamily)]


def _families_with(name: str, value: object) -> str:
    return " or ".join(one.name for one in _dense() if one.fixed.get(name, value) == value)


def _check_sizes(document: Mapping[str, Any]) -> None:
    """Refuse a size that is none, before lists as long as it are made."""
    for name in _SIZES:
        if name not in document:
            raise ModelError(f"config.json lacks {name!r}; add it")
        if type(document[name]) is not int or document[name] < 1:
            shown = repr(document[name])[:60]
            raise ModelError(f"{name} is {shown}; give a whole number of at least 1")
        if document[name] > MOST[name]:
            raise ModelError(
                f"{name}={str(document[name])[:60]} is beyond reason; give at most {MOST[name]}"
            )


def _slides(given: Mapping[str, Any]) -> bool:
    uses = given.get("use_sliding_window", False)
    if type(uses) is not bool:
        raise ModelError(f"use_sliding_window is {repr(uses)[:60]}; give true or false")
    return uses


def _sliding_layers(kinds: Any, count: int) -> tuple[int, ...]:
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != count or any(k not in known for k in kinds):
        raise ModelError(
            f"layer_types={str(kinds)[:60]} is not supported; give full_attention or"
            f" sliding_attention for each of {count} layers"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")


def _rope(given: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from the old spelling (rope_theta, rope_scaling) or rope_parameters."""
    new, old = given.get("rope_parameters"), given.get("rope_scaling")
    if new and old and new != old:
        raise ModelError(
            "rope_parameters and rope_scaling differ, and readers disagree on which holds; keep one"
        )
    rope = new or old or {}
    unknown = sorted(set(rope) - _ROPE) if isinstance(rope, dict) else [rope]
    if unknown:
        shown = repr(unknown[0])[:60]
        raise ModelError(f"rotary setting {shown} is not supported; known: {sorted(_ROPE)}")
    theta = rope.get("rope_theta", given.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"partial_rotary_factor={repr(rope['partial_rotary_factor'])[:60]} is not supported;"
            " only 1.0 is"
        )
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        shown = repr(kind)[:60]
        raise ModelError(f"rope_type {shown} is not supported; supported: default, linear, llama3")
    names = _LLAMA3 if kind == "llama3" else ("factor",)
    missing = [name for name in names if name not in rope]
    if missing:
        raise ModelError(f"rope scaling {kind!r} lacks {missing[0]!r}; add it to config.json")
    return theta, RopeScaling(kind=kind, **{name: rope[name] for name in names})


def _rope_document(config: DecoderConfig) -> dict[str, object] | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
    names = _LLAMA3 if scaling.kind == "llama3" else ("factor",)
    return {"rope_type": scaling.kind, **{name: getattr(scaling, name) for name in names}}


def _layer_types(config: DecoderConfig) -> list[str]:
    windows = map(config.window, range(config.num_hidden_layers))
    return ["full_attention" if window is None else "sliding_attention" for window in windows]
