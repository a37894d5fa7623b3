"""Families of dense decoders: how one's config.json is read and written, as data."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from attrs import field, fields, frozen
from torch import nn

from ms_parallel import operators
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.config import MOST, TOKENS, token_ids
from ms_parallel.models.config_keys import check_keys
from ms_parallel.models.decoder import Decoder, plan
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.family import Family, families
from ms_parallel.models.parts.block import Block
from ms_parallel.models.parts.norm import RMSNorm
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.positions.document import ONE_ROPE, Positions
from ms_parallel.models.positions.windows import NO_WINDOWS, Windows
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
"""Settings of windows, and the key of config.json without which a folder cannot hold them."""


@frozen(kw_only=True)
class DenseFamily(Family):
    """A family of decoders whose weights bear Hugging Face's names."""

    config: type[DecoderConfig] = DecoderConfig
    """The class of its configurations."""
    model: Callable[..., nn.Module] = Decoder
    """Builds the model."""
    plan: Callable[[Any], ModelPlan] = plan
    """How the model may be split."""
    block: Callable[[Any, int, Ops], nn.Module] = Block
    """Builds the block of a layer's global number."""
    norm: Callable[[int, float, Ops], nn.Module] = RMSNorm
    """Builds the final norm, of (width, eps, ops)."""
    transformers_class: str
    """What transformers builds of its config.json."""
    fixed: Mapping[str, object]
    """Settings that its files cannot vary, with their values, but for those of `windows`."""
    silent: Mapping[str, object]
    """What transformers takes where its config.json is silent."""
    neutral: Mapping[str, tuple[object, ...]] = field(factory=dict)
    """Keys of its config.json that are not read, with the values that change nothing."""
    also_called: Mapping[str, str] = field(factory=dict)
    """Other keys for settings of its own, by their names in its config.json."""
    activation: Mapping[str, str] = field(factory=lambda: {"hidden_act": "silu"})
    """The keys that name its activation, and the one that it is."""
    positions: Positions = ONE_ROPE
    """How its config.json says how positions turn."""
    windows: Windows = NO_WINDOWS
    """How its config.json says which layers slide."""
    null_key_heads: bool = True
    """Whether a `num_key_value_heads` of null is as many as heads."""
    null_head_dim: bool = False
    """Whether a `head_dim` of null is a head's share of the hidden size."""
    output_bias: bool = True
    """Whether attention's output projection has a bias where its inputs have one."""
    whole_heads: bool = False
    """Whether transformers wants the hidden size to be a multiple of the heads."""

    @property
    def own(self) -> tuple[str, ...]:
        """Settings of its configurations beside those of all decoders."""
        all_have = {setting.name for setting in fields(DecoderConfig)}
        return tuple(each.name for each in fields(self.config) if each.name not in all_have)

    @property
    def unvaried(self) -> Mapping[str, object]:
        """All settings that its files cannot vary, those of windows too."""
        unheld = (name for name, key in _WINDOW_KEYS.items() if key not in self.windows.keys)
        return {**dict.fromkeys(unheld), **self.fixed}

    @property
    def default(self) -> Mapping[str, object]:
        """Settings of a small model: those of all, the fixed ones, and its own."""
        return {**_SMALL, **self.unvaried, **self.small, "model_type": self.name}

    def build(self, config: DecoderConfig, *, ops: Ops | None = None, **part: Any) -> nn.Module:
        """Build the model or one stage of it, with unset weights."""
        made = {"block": self.block, "norm": self.norm, **part}
        return self.model(config, ops=ops or operators, **made)

    def check(self, config: DecoderConfig) -> None:
        """Refuse settings that its config.json cannot express.

        Raises:
            ConfigError: names the setting, and the families that have it.
        """
        for name, value in self.unvaried.items():
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
        document = self._by_own_names(document)
        free = [name for name in _BIASES if name not in self.fixed]
        biases = {name: (self.fixed[name],) for name in _BIASES if name in self.fixed}
        activation = {name: (value,) for name, value in self.activation.items()}
        neutral = {**biases, **activation, **self.neutral}
        used = self.windows.keys.union(self.positions.keys, free, self.own)
        check_keys(self.name, used, neutral, document)
        _check_sizes(document)
        # Where a key is null, its default does not count: null is a value of its own, or refused.
        given = {**self.silent, **document}
        window, layers = self.windows.read(given)
        heads: Any = given.get("num_key_value_heads")
        if heads is None and self.null_key_heads:
            heads = given["num_attention_heads"]
        chosen: dict[str, object] = {name: given.get(name, False) for name in free}
        chosen |= {name: given[name] for name in (*_COPIED, *self.own) if name in given}
        chosen |= {"sliding_window": window, "sliding_layers": layers}
        chosen |= self.positions.read(given)
        return self.config(
            model_type=self.name,
            num_key_value_heads=heads,
            head_dim=self._head_dim(given),
            **cast(Any, {**chosen, **self.unvaried}),
            **{name: token_ids(name, given.get(name)) for name in TOKENS},
        )

    def write(self, config: DecoderConfig, dtype: torch.dtype) -> dict[str, object]:
        """Return the content of config.json, in the spelling that all versions of readers know."""
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
            **{name: getattr(config, name) for name in (*free, *self.own)},
            **self.positions.write(config),
            **self.windows.write(config),
        }

    def _by_own_names(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Rename the keys of a config.json to our settings' names; refuse values that differ."""
        named = {key: value for key, value in document.items() if key not in self.also_called}
        for key, own in self.also_called.items():
            if key in document and named.setdefault(own, document[key]) != document[key]:
                raise ModelError(
                    f"{own}={repr(named[own])[:60]} and {key}={repr(document[key])[:60]} differ,"
                    " and readers disagree on which holds; keep one"
                )
        return named

    def _head_dim(self, given: Mapping[str, Any]) -> Any:
        """Return the given width of a head, or its share of the hidden size if that is allowed."""
        if "head_dim" in given and not (given["head_dim"] is None and self.null_head_dim):
            return given["head_dim"]
        return given["hidden_size"] // given["num_attention_heads"]


def _dense() -> list[DenseFamily]:
    return [family for family in families() if isinstance(family, DenseFamily)]


def _families_with(name: str, value: object) -> str:
    return " or ".join(one.name for one in _dense() if one.unvaried.get(name, value) == value)


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
