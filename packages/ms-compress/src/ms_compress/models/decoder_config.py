"""Configuration of a decoder of the Llama family, read from config.json and checked."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from attrs import frozen

from ms_compress.errors import ExportError, LayerError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
EXPERT_FAMILIES = ("qwen3_moe", "mixtral")
"""Families with experts, for targets that support experts."""
UNSUPPORTED = ("transformer-xl",)
"""Families of ms-parallel that no deployment runtime supports."""
LAYER_PARTS = {
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
    *("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    *(f"self_attn.{name}_proj.{part}" for name in "qkvo" for part in ("weight", "bias")),
    *(f"mlp.{name}_proj.{part}" for name in ("gate", "up", "down") for part in ("weight", "bias")),
}
EXPERT_PART = re.compile(
    r"(mlp|block_sparse_moe)\.(gate|experts\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3))\.weight"
)
"""Names of a mixture of experts in a layer, of both expert families."""
MODEL_TENSORS = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


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
    """Attention window per layer; None for full attention."""
    frequency_divisors: tuple[float, ...] | None
    """(head_width / 2,) divisors of the rotary frequencies."""
    linear_factor: float | None
    """Divisor of the positions."""
    experts: int = 0
    """Number of experts of each layer; 0 for a dense model."""
    experts_per_token: int = 0


def decoder_config(
    document: Mapping[str, Any], target: str, families: tuple[str, ...] = FAMILIES
) -> DecoderConfig:
    """Parse a model's config.json for a target that supports certain families.

    Raises:
        ExportError: the model is not of the Llama family, or has a setting that no target supports.
    """
    family = document.get("model_type")
    check_deployable(document)
    if family not in families:
        raise ExportError(
            f"{target} supports the families {', '.join(families)}, got {family!r}; use a ct"
            " scheme, which supports every model in transformers"
        )
    if (act := document.get("hidden_act", "silu")) != "silu":
        raise ExportError(f"{target}: hidden_act must be 'silu', got {act!r}; use a ct scheme")
    heads = document["num_attention_heads"]
    width = document.get("head_dim") or document["hidden_size"] // heads
    # transformers 5 writes `rope_parameters`, earlier versions `rope_scaling` and `rope_theta`.
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    theta = rope.get("rope_theta", document.get("rope_theta", 10000.0))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    divisors, factor = _rope(rope_type, rope, theta, width, target)
    return DecoderConfig(
        family=family,
        vocabulary=document["vocab_size"],
        hidden=document["hidden_size"],
        inner=document["moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"],
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
        **(_experts(document, target) if family in EXPERT_FAMILIES else {}),
    )


def _experts(document: Mapping[str, Any], target: str) -> dict[str, int]:
    """Return the fields of a decoder whose layers all have experts.

    Raises:
        ExportError: some layers are dense, or the weights of a token's experts do not add up to 1.
    """
    if document.get("mlp_only_layers") or document.get("decoder_sparse_step", 1) != 1:
        raise ExportError(
            f"{target}: all layers must have experts, got mlp_only_layers"
            f" {document.get('mlp_only_layers')} and decoder_sparse_step"
            f" {document.get('decoder_sparse_step')}; use a ct scheme"
        )
    if document.get("model_type") == "qwen3_moe" and not document.get("norm_topk_prob"):
        raise ExportError(
            f"{target}: norm_topk_prob must be true, as llama.cpp normalizes the weights of a"
            " token's experts, got false; use a ct scheme"
        )
    # Mixtral and Qwen 3 name the number of experts differently; transformers 5 has both names.
    count = document.get("num_local_experts") or document["num_experts"]
    return {"experts": count, "experts_per_token": document["num_experts_per_tok"]}


def check_deployable(document: Mapping[str, Any]) -> None:
    """Check that some deployment runtime supports the model.

    Raises:
        ExportError: no runtime supports its family.
    """
    family = document.get("model_type")
    if family in UNSUPPORTED:
        raise ExportError(
            f"this model is {family!r}, which llama.cpp, onnxruntime, transformers and vLLM do not"
            " support, so no scheme can export it; run it with ms_parallel.load_model, or train a"
            " decoder of the Llama family to deploy one"
        )


def check_names(names: Iterable[str], target: str, *, experts: bool = False) -> None:
    """Check that the target's decoder has all tensors.

    Raises:
        LayerError: it lacks one, which the message names.
    """
    for name in names:
        layer, dot, part = name.removeprefix("model.layers.").partition(".")
        is_known = name in MODEL_TENSORS or (
            name.startswith("model.layers.")
            and dot
            and layer.isdigit()
            and (part in LAYER_PARTS or (experts and EXPERT_PART.fullmatch(part)))
        )
        if not is_known:
            raise LayerError(
                f"{target} does not support the tensor {name!r}, only tensors of the standard"
                f" layers of {', '.join(FAMILIES)}; use a ct scheme"
            )


def _windows(family: str, document: Mapping[str, Any], target: str) -> tuple[int | None, ...]:
    """Return attention windows as in the transformers model of each family."""
    count: int = document["num_hidden_layers"]
    window: int | None = document.get("sliding_window")
    # Llama models have no windows, and one as long as the context hides nothing.
    if family == "llama" or window is None or window >= document["max_position_embeddings"]:
        return (None,) * count
    if family in ("mistral", "mixtral"):
        return (window,) * count  # all layers
    if not document.get("use_sliding_window"):
        return (None,) * count
    layer_types = document.get("layer_types")
    if layer_types is None:
        first = document.get("max_window_layers", 28)  # transformers' default
        return tuple(None if layer < first else window for layer in range(count))
    window_of = {"full_attention": None, "sliding_attention": window}
    if len(layer_types) != count or not window_of.keys() >= set(layer_types):
        raise ExportError(
            f"{target}: layer_types must have {' or '.join(window_of)} for each of {count} layers,"
            f" got {layer_types!r}; correct config.json"
        )
    return tuple(window_of[layer_type] for layer_type in layer_types)


def _rope(
    rope_type: str, rope: Mapping[str, Any], theta: float, width: int, target: str
) -> tuple[tuple[float, ...] | None, float | None]:
    if rope_type == "default":
        return None, None
    if rope_type == "linear":
        return None, float(rope["factor"])
    if rope_type != "llama3":
        raise ExportError(
            f"{target}: rope_type must be default, linear or llama3, got {rope_type!r}; use a ct"
            " scheme"
        )
    return llama3_divisors(rope, theta, width), None


def llama3_divisors(rope: Mapping[str, Any], theta: float, width: int) -> tuple[float, ...]:
    """Return the divisors of Llama 3's rotary frequencies, (width / 2,)."""
    # Interpolate between scaled (low) and unscaled (high) rotary frequencies.
    frequencies = theta ** -(np.arange(0, width, 2) / width)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    unscaled = ((turns - low) / (high - low)).clip(0, 1)  # (D / 2,): 1 keeps a frequency
    return tuple((1 / (unscaled + (1 - unscaled) / rope["factor"])).tolist())
