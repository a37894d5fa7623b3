"""Hugging Face's config.json of the Llama family, read and written."""

from collections.abc import Mapping
from typing import Any

import torch

from ms_parallel.errors import ModelError
from ms_parallel.models.config import DecoderConfig, RopeScaling

__all__ = ["FAMILIES", "from_document", "to_document"]

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
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
"""What transformers takes where a family's config.json is silent."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "num_experts": (0, None),
    "num_local_experts": (0, 1, None),
    "n_routed_experts": (0, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (1, None),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "logits_scaling": (1, None),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "use_mrope": (False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}
"""Settings that would change the computation, with the values under which they do not."""

_MOST_LAYERS = 100_000
"""Lists as long as this are made before the weights are looked at."""

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
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def from_document(document: Mapping[str, Any]) -> DecoderConfig:
    """Understand a config.json, decoded.

    Raises:
        ModelError: a setting is missing, or asks for something that the decoder does not do.
        ConfigError: a value is out of range.
    """
    family: Any = document.get("model_type")
    if family not in tuple(FAMILIES):  # a damaged one may not even be hashable
        raise ModelError(
            f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    for name, values in _NEUTRAL.items():
        if name in document and document[name] not in values:
            raise ModelError(f"{name}={document[name]!r} is not supported; only {values[0]!r} is")
    for name in _SIZES:
        if name not in document:
            raise ModelError(f"config.json lacks {name!r}; add it")
        if type(document[name]) is not int or document[name] < 1:
            raise ModelError(f"{name} is {document[name]!r}; give a whole number of at least 1")
    if document["num_hidden_layers"] > _MOST_LAYERS:
        raise ModelError(f"num_hidden_layers={document['num_hidden_layers']} is beyond reason")
    given = {**_DEFAULTS[family], **{k: v for k, v in document.items() if v is not None}}
    queries = given["num_attention_heads"]
    settings = {name: given[name] for name in _COPIED if name in given}
    for name in _TOKENS:
        token = given.get(name)
        settings[name] = tuple(token) if isinstance(token, list) else token
    window, layers = _window(family, given, document)
    theta, scaling = _rope(given)
    return DecoderConfig(
        model_type=family,
        num_key_value_heads=given.get("num_key_value_heads", queries),
        head_dim=given.get("head_dim", given["hidden_size"] // queries),
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=family == "qwen2" or given.get("attention_bias", False),
        mlp_bias=given.get("mlp_bias", False) if family == "llama" else False,
        query_key_norm=family == "qwen3",
        sliding_window=window,
        sliding_layers=layers,
        **settings,
    )


def _window(
    family: str, given: Mapping[str, Any], document: Mapping[str, Any]
) -> tuple[int | None, tuple[int, ...] | None]:
    """The sliding window and the layers that it applies to."""
    if family == "llama":
        return None, None
    if family == "mistral":
        return document.get("sliding_window", 4096), None  # an explicit null means none
    if not given.get("use_sliding_window", False):
        return None, None
    window, count = document.get("sliding_window", 4096), given["num_hidden_layers"]
    if window is None:
        return None, None
    kinds, first = given.get("layer_types"), given.get("max_window_layers", 28)
    if kinds is None and type(first) is int:
        return window, tuple(range(first, count))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != count or any(k not in known for k in kinds):
        raise ModelError(
            f"layer_types={kinds!r} is not supported; give full_attention or sliding_attention"
            f" for each of {count} layers"
        )
    return window, tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")


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
        raise ModelError(f"rotary setting {unknown[0]!r} is not supported; known: {sorted(_ROPE)}")
    theta = rope.get("rope_theta", given.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported; only 1.0 is"
        )
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise ModelError(f"rope_type {kind!r} is not supported; supported: default, linear, llama3")
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
        **{name: getattr(config, name) for name in (*_COPIED, *_TOKENS)},
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
    slides = [config.window(layer) is not None for layer in range(count)]
    return {
        "use_sliding_window": any(slides),
        "sliding_window": config.sliding_window,
        # Older readers know no layer_types: to them all layers from this one on slide.
        "max_window_layers": slides.index(True) if any(slides) else count,
        "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
    }
