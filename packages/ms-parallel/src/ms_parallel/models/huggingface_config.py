"""Hugging Face's config.json of the Llama family, read and written."""

from collections.abc import Mapping
from typing import Any

import torch

from ms_parallel.errors import ModelError
from ms_parallel.models.config import MOST, DecoderConfig, RopeScaling
from ms_parallel.models.config_keys import check_keys

__all__ = ["FAMILIES", "TOKENS", "from_document", "to_document", "token_ids"]

FAMILIES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""model_type to the class that transformers builds."""

_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "max_window_layers": 28,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "max_window_layers": 28,
        "head_dim": 128,
    },
}
"""What transformers takes where a family's config.json is silent."""

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
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ROPE = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *_LLAMA3}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of the tokens that begin, end and pad a text."""


def from_document(document: Mapping[str, Any]) -> DecoderConfig:
    """Understand a config.json, decoded.

    Raises:
        ModelError: a setting is missing, or asks for something that the decoder does not do.
        ConfigError: a value is out of range.
    """
    family: Any = document.get("model_type")
    if family not in tuple(FAMILIES):  # a damaged one may not even be hashable
        raise ModelError(
            f"model_type {repr(family)[:60]} is not supported; supported: {', '.join(FAMILIES)}"
        )
    check_keys(family, document)
    for name in _SIZES:
        if name not in document:
            raise ModelError(f"config.json lacks {name!r}; add it")
        if type(document[name]) is not int or document[name] < 1:
            shown = repr(document[name])[:60]
            raise ModelError(f"{name} is {shown}; give a whole number of at least 1")
        if document[name] > MOST[name]:  # before lists as long as this are made
            raise ModelError(
                f"{name}={str(document[name])[:60]} is beyond reason; give at most {MOST[name]}"
            )
    # Where a key is null, its default does not count: null is a value of its own, or refused.
    given = {**_DEFAULTS[family], **document}
    window, layers = _window(family, given)
    theta, scaling = _rope(given)
    return DecoderConfig(
        model_type=family,
        num_key_value_heads=_key_value_heads(given),
        head_dim=_head_dim(family, given),
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=family == "qwen2" or given.get("attention_bias", False),
        mlp_bias=given.get("mlp_bias", False) if family == "llama" else False,
        query_key_norm=family == "qwen3",
        sliding_window=window,
        sliding_layers=layers,
        **{name: given[name] for name in _COPIED if name in given},
        **{name: token_ids(name, given.get(name)) for name in TOKENS},
    )


def _key_value_heads(given: Mapping[str, Any]) -> Any:
    count = given.get("num_key_value_heads")
    return given["num_attention_heads"] if count is None else count


def _head_dim(family: str, given: Mapping[str, Any]) -> Any:
    """The width that is given, or a head's share of the hidden size where the family allows it."""
    null_means_share = family in ("llama", "mistral")
    if "head_dim" in given and not (given["head_dim"] is None and null_means_share):
        return given["head_dim"]
    return given["hidden_size"] // given["num_attention_heads"]


def token_ids(name: str, value: Any) -> Any:
    """One id, several as a tuple, or None; -1, which some files hold, is no token."""
    ids = value if isinstance(value, list) else [value]
    if value is None or value == -1:
        return None
    if not ids or any(type(token) is not int or not 0 <= token < 1 << 31 for token in ids):
        raise ModelError(f"{name} is {str(value)[:60]!r}; give a token id, a list of some, or null")
    return tuple(ids) if isinstance(value, list) else value


def _window(family: str, given: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...] | None]:
    """The sliding window and the layers that it applies to."""
    if family == "llama":
        return None, None
    window, count = given.get("sliding_window", 4096), given["num_hidden_layers"]
    if family != "mistral":
        first = given["max_window_layers"]
        if type(first) is not int:
            raise ModelError(f"max_window_layers is {str(first)[:60]!r}; give a whole number")
        window = window if _slides(given) else None
    kinds = given.get("layer_types")
    if kinds is not None:
        layers = _sliding_layers(kinds, count)
        if layers and window is None:
            raise ModelError(
                "layer_types has sliding_attention, but there is no sliding_window; give one, or"
                " full_attention for each layer"
            )
        return (window, layers) if layers else (None, None)
    if window is None or family == "mistral":
        return window, None
    return window, tuple(range(max(0, given["max_window_layers"]), count))


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


def to_document(config: DecoderConfig, dtype: torch.dtype) -> dict[str, object]:
    """The config.json of a configuration, in the spelling that all versions of readers know."""
    document: dict[str, object] = {
        "architectures": [FAMILIES[config.model_type]],
        "model_type": config.model_type,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        **{name: getattr(config, name) for name in (*_COPIED, *TOKENS)},
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_document(config),
    }
    if config.model_type in ("llama", "qwen3"):
        document["attention_bias"] = config.attention_bias
    if config.model_type == "llama":
        document["mlp_bias"] = config.mlp_bias
    if config.model_type == "mistral":
        document["sliding_window"] = config.sliding_window
        # Named only where layers differ: readers that know no layer_types let all of them slide.
        if config.sliding_window is not None and config.sliding_layers is not None:
            document["layer_types"] = _layer_types(config)
    if config.model_type in ("qwen2", "qwen3"):
        document |= _window_document(config)
    return document


def _rope_document(config: DecoderConfig) -> dict[str, object] | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
    names = _LLAMA3 if scaling.kind == "llama3" else ("factor",)
    return {"rope_type": scaling.kind, **{name: getattr(scaling, name) for name in names}}


def _window_document(config: DecoderConfig) -> dict[str, object]:
    count = config.num_hidden_layers
    kinds = _layer_types(config)
    slides = [kind == "sliding_attention" for kind in kinds]
    return {
        "use_sliding_window": any(slides),
        "sliding_window": config.sliding_window,
        # Older readers know no layer_types: to them all layers from this one on slide.
        "max_window_layers": slides.index(True) if any(slides) else count,
        "layer_types": kinds,
    }


def _layer_types(config: DecoderConfig) -> list[str]:
    windows = map(config.window, range(config.num_hidden_layers))
    return ["full_attention" if window is None else "sliding_attention" for window in windows]
