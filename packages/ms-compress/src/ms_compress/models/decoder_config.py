"""The configuration of a decoder of the Llama family: what its config.json says, checked."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from attrs import frozen

from ms_compress.errors import ExportError, LayerError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
NOWHERE = ("transformer-xl",)
"""Families of ms-parallel's that no runtime of ours has."""
LAYER_PARTS = {
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
    *("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    *(f"self_attn.{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")),
    *(f"mlp.{name}_proj.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias")),
}
ENDS = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


@frozen(kw_only=True)
class DecoderConfig:
    """Sizes and constants of a decoder."""

    family: str
    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    positions: int
    eps: float
    theta: float
    windows: tuple[int | None, ...]
    """Keys that a query sees, layer by layer; None for all."""
    frequency_divisors: tuple[float, ...] | None
    """(head_width / 2,) what rotary frequencies are divided by."""
    linear_factor: float | None
    """What positions are divided by."""


def decoder_config(document: Mapping[str, Any], target: str) -> DecoderConfig:
    """Read a config.json's document for a target.

    Raises:
        ExportError: the model is not of the Llama family, or has a setting that no target of ours
            computes.
    """
    family = document.get("model_type")
    check_deployable(document)
    if family not in FAMILIES:
        raise ExportError(
            f"{target} takes decoders of the families {', '.join(FAMILIES)}, and this model is"
            f" {family!r}; choose a ct scheme, which takes whatever transformers has"
        )
    if (act := document.get("hidden_act", "silu")) != "silu":
        raise ExportError(f"{target}: hidden_act is {act!r}; only 'silu' is known")
    heads = document["num_attention_heads"]
    width = document.get("head_dim") or document["hidden_size"] // heads
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    theta = rope.get("rope_theta", document.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    divisors, factor = _rope(kind, rope, theta, width, target)
    return DecoderConfig(
        family=family,
        vocabulary=document["vocab_size"],
        hidden=document["hidden_size"],
        inner=document["intermediate_size"],
        layers=document["num_hidden_layers"],
        heads=heads,
        key_heads=document.get("num_key_value_heads") or heads,
        head_width=width,
        positions=document["max_position_embeddings"],
        eps=document.get("rms_norm_eps", 1e-6),
        theta=theta,
        windows=_windows(family, document, target),
        frequency_divisors=divisors,
        linear_factor=factor,
    )


def check_deployable(document: Mapping[str, Any]) -> None:
    """Refuse a model that none of the runtimes computes.

    Raises:
        ExportError: it is of such a family.
    """
    family = document.get("model_type")
    if family in NOWHERE:
        raise ExportError(
            f"this model is {family!r}, which llama.cpp, onnxruntime, transformers and vLLM do not"
            " compute, so no scheme exports it; run it with ms_parallel.load_model, or train a"
            " decoder of the Llama family to deploy one"
        )


def check_names(names: Iterable[str], target: str) -> None:
    """Refuse tensors that the target's decoder does not have.

    Raises:
        LayerError: names the first one.
    """
    for name in names:
        head, dot, rest = name.removeprefix("model.layers.").partition(".")
        known = name in ENDS or (
            name.startswith("model.layers.") and dot and head.isdigit() and rest in LAYER_PARTS
        )
        if not known:
            raise LayerError(
                f"{target} does not know the tensor {name!r}; it knows decoders of the families"
                f" {', '.join(FAMILIES)} with their own layers alone"
            )


def _windows(family: str, document: Mapping[str, Any], target: str) -> tuple[int | None, ...]:
    """Read windows of attention as transformers' models of each family do."""
    count: int = document["num_hidden_layers"]
    window: int | None = document.get("sliding_window")
    if family == "llama" or window is None or window >= document["max_position_embeddings"]:
        return (None,) * count
    if family == "mistral":
        return (window,) * count
    if not document.get("use_sliding_window"):
        return (None,) * count
    kinds = document.get("layer_types")
    if kinds is None:
        first = document.get("max_window_layers", 28)
        return tuple(None if layer < first else window for layer in range(count))
    of_kind = {"full_attention": None, "sliding_attention": window}
    if len(kinds) != count or not of_kind.keys() >= set(kinds):
        raise ExportError(
            f"{target}: layer_types is {kinds!r}; it must give {' or '.join(of_kind)} for each of"
            f" {count} layers"
        )
    return tuple(of_kind[kind] for kind in kinds)


def _rope(
    kind: str, rope: Mapping[str, Any], theta: float, width: int, target: str
) -> tuple[tuple[float, ...] | None, float | None]:
    if kind == "default":
        return None, None
    if kind == "linear":
        return None, float(rope["factor"])
    if kind != "llama3":
        raise ExportError(f"{target}: rotary scaling {kind!r} is not known; linear and llama3 are")
    frequencies = theta ** -(np.arange(0, width, 2) / width)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clip(0, 1)
    return tuple((1 / (keep + (1 - keep) / rope["factor"])).tolist()), None
