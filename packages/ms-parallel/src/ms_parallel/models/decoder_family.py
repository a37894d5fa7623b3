"""Decoder families as data, and conversion from and to their config.json."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from attrs import field, fields, frozen
from torch import nn

from ms_parallel import operators
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.config import SIZE_LIMITS, TOKENS, token_ids
from ms_parallel.models.config_keys import check_keys
from ms_parallel.models.decoder import Decoder, plan
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.family import Family, families
from ms_parallel.models.parts.block import Block
from ms_parallel.models.parts.norm import RMSNorm
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.positions.rope_format import SHARED_ROPE, RopeFormat
from ms_parallel.models.positions.window_format import NO_WINDOW, WindowFormat
from ms_parallel.operators.protocol import Ops

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
_WINDOW_KEYS = {"sliding_window": "sliding_window", "sliding_layers": "layer_types"}
"""Window settings, and the config.json key that a family needs to support them."""


@frozen(kw_only=True)
class DecoderFamily(Family):
    """Decoder family whose modules have Hugging Face's names."""

    config: type[DecoderConfig] = DecoderConfig
    """Configuration class."""
    model: Callable[..., nn.Module] = Decoder
    """Builds the model."""
    plan: Callable[[Any], ModelPlan] = plan
    """Returns the parallel plan of a configuration."""
    block: Callable[[Any, int, Ops], nn.Module] = Block
    """Builds a block from (config, global layer index, ops)."""
    norm: Callable[[int, float, Ops], nn.Module] = RMSNorm
    """Builds the final norm from (width, eps, ops)."""
    transformers_class: str
    """Class in transformers, for `architectures` in config.json."""
    fixed: Mapping[str, object]
    """Settings without a key in config.json, and their values; window settings excluded."""
    transformers_defaults: Mapping[str, object]
    """transformers' defaults for keys missing from config.json."""
    neutral: Mapping[str, tuple[object, ...]] = field(factory=dict)
    """Unused keys of config.json, with the values that have no effect."""
    aliases: Mapping[str, str] = field(factory=dict)
    """Alternative keys in config.json, mapped to this family's names."""
    activation: Mapping[str, str] = field(factory=lambda: {"hidden_act": "silu"})
    """Keys that name the activation, with its required value."""
    positions: RopeFormat = SHARED_ROPE
    """Reader and writer of the rotary settings."""
    windows: WindowFormat = NO_WINDOW
    """Reader and writer of the sliding-window settings."""
    null_key_heads: bool = True
    """Whether `num_key_value_heads` null means the number of attention heads."""
    null_head_dim: bool = False
    """Whether `head_dim` null means hidden_size / num_attention_heads."""
    output_bias: bool = True
    """Whether `attention_bias` also applies to the output projection."""
    heads_divide_hidden: bool = False
    """Whether transformers requires the hidden size to be a multiple of the head count."""

    @property
    def extra_settings(self) -> tuple[str, ...]:
        """Settings of this family in addition to `DecoderConfig`'s."""
        common = {setting.name for setting in fields(DecoderConfig)}
        return tuple(f.name for f in fields(self.config) if f.name not in common)

    @property
    def all_fixed(self) -> Mapping[str, object]:
        """All settings without a key in config.json, window settings included."""
        unsupported = (name for name, key in _WINDOW_KEYS.items() if key not in self.windows.keys)
        return {**dict.fromkeys(unsupported), **self.fixed}

    @property
    def default(self) -> Mapping[str, object]:
        """Settings of a small model: common, fixed and family-specific ones."""
        return {**_SMALL, **self.all_fixed, **self.small, "model_type": self.name}

    def build(self, config: DecoderConfig, *, ops: Ops | None = None, **part: Any) -> nn.Module:
        """Build the model or one of its stages, with uninitialized weights."""
        arguments = {"block": self.block, "norm": self.norm, **part}
        return self.model(config, ops=ops or operators, **arguments)

    def check(self, config: DecoderConfig) -> None:
        """Check that this family's config.json can represent the settings.

        Raises:
            ConfigError: it cannot; names the setting and the families that support it.
        """
        for name, value in self.all_fixed.items():
            setting = getattr(config, name)
            if setting != value:
                raise ConfigError(
                    f"model_type {self.name!r} does not support {name}={setting}; use model_type"
                    f" {_families_with(name, setting)}"
                )
        if self.heads_divide_hidden and config.hidden_size % config.num_attention_heads:
            names = [f.name for f in _decoder_families() if not f.heads_divide_hidden]
            raise ConfigError(
                f"hidden_size of {self.name} must be a multiple of num_attention_heads="
                f"{config.num_attention_heads}, got {config.hidden_size}; model_type"
                f" {', '.join(names[:-1])} or {names[-1]} has no such limit"
            )

    def read(self, document: Mapping[str, Any]) -> DecoderConfig:
        """Build the configuration from a decoded config.json.

        Raises:
            ModelError: a setting is missing or not supported.
            ConfigError: a value is out of range.
        """
        document = self._resolve_aliases(document)
        free = [name for name in _BIASES if name not in self.fixed]
        # Bias and activation keys are checked against this family's only supported value.
        biases = {name: (self.fixed[name],) for name in _BIASES if name in self.fixed}
        activation = {name: (value,) for name, value in self.activation.items()}
        neutral = {**biases, **activation, **self.neutral}
        used = self.windows.keys.union(self.positions.keys, free, self.extra_settings)
        check_keys(self.name, used, neutral, document)
        _check_sizes(document)
        # Defaults apply to missing keys only; null has its own meaning or is rejected.
        completed = {**self.transformers_defaults, **document}
        window, layers = self.windows.read(completed)
        heads: Any = completed.get("num_key_value_heads")
        if heads is None and self.null_key_heads:
            heads = completed["num_attention_heads"]
        settings: dict[str, object] = {name: completed.get(name, False) for name in free}
        settings |= {
            name: completed[name] for name in (*_COPIED, *self.extra_settings) if name in completed
        }
        settings |= {"sliding_window": window, "sliding_layers": layers}
        settings |= self.positions.read(completed)
        return self.config(
            model_type=self.name,
            num_key_value_heads=heads,
            head_dim=self._head_dim(completed),
            **cast(Any, {**settings, **self.all_fixed}),
            **{name: token_ids(name, completed.get(name)) for name in TOKENS},
        )

    def write(self, config: DecoderConfig, dtype: torch.dtype) -> dict[str, object]:
        """Return the content of config.json, with keys that all transformers versions read."""
        names = (*_COPIED, *TOKENS, "num_key_value_heads", "head_dim")
        free = [name for name in _BIASES if name not in self.fixed]
        return {
            "architectures": [self.transformers_class],
            "model_type": self.name,
            **self.activation,
            "attention_dropout": 0.0,
            "torch_dtype": str(dtype).removeprefix("torch."),
            "use_cache": True,
            **{name: getattr(config, name) for name in names},
            **{name: getattr(config, name) for name in (*free, *self.extra_settings)},
            **self.positions.write(config),
            **self.windows.write(config),
        }

    def _resolve_aliases(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Rename alternative keys of a config.json to setting names; conflicts are an error."""
        merged = {key: value for key, value in document.items() if key not in self.aliases}
        for key, name in self.aliases.items():
            if key in document and merged.setdefault(name, document[key]) != document[key]:
                raise ModelError(
                    f"{name} and its alias {key} must be equal, got {repr(merged[name])[:60]} and"
                    f" {repr(document[key])[:60]}; remove one"
                )
        return merged

    def _head_dim(self, document: Mapping[str, Any]) -> Any:
        """Return `head_dim`, or hidden_size / num_attention_heads where it may be omitted."""
        if "head_dim" in document and not (document["head_dim"] is None and self.null_head_dim):
            return document["head_dim"]
        return document["hidden_size"] // document["num_attention_heads"]


def _decoder_families() -> list[DecoderFamily]:
    return [family for family in families() if isinstance(family, DecoderFamily)]


def _families_with(name: str, value: object) -> str:
    return " or ".join(f.name for f in _decoder_families() if f.all_fixed.get(name, value) == value)


def _check_sizes(document: Mapping[str, Any]) -> None:
    """Reject invalid sizes before lists of that length are allocated."""
    for name in _SIZES:
        if name not in document:
            raise ModelError(f"config.json must have {name!r}; add it")
        if type(document[name]) is not int or document[name] < 1:
            shown = repr(document[name])[:60]
            raise ModelError(f"{name} must be an integer of at least 1, got {shown}")
        if document[name] > SIZE_LIMITS[name]:
            raise ModelError(
                f"{name} must be at most {SIZE_LIMITS[name]}, got {str(document[name])[:60]}"
            )
