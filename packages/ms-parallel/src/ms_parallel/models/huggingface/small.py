"""Small configurations of transformers' models, for trial runs and tests.

A default configuration has the sizes of a published model. Here all sizes are lowered to a few
dozen, and the layers are reduced to a few that include one of each kind.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ms_parallel.errors import ModelError
from ms_parallel.models.config import TOKENS
from ms_parallel.models.huggingface.config import TransformersModel

SMALL: Mapping[str, int] = {
    "vocab_size": 48,
    "vocab_size_per_layer_input": 48,
    "unpadded_vocab_size": 48,
    "hidden_size": 32,
    "d_model": 32,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "emb_dim": 32,
    "embedding_dim": 32,
    "lru_width": 32,
    "dim_model_base": 16,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "intermediate_size_mlp": 48,
    "dense_intermediate_size": 48,
    "n_inner": 48,
    "dff": 48,
    "dim_ff": 48,
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "linear_num_heads": 4,
    "head_dim": 8,
    "swa_head_dim": 8,
    "global_head_dim": 8,
    "linear_head_dim": 8,
    "kv_channels": 8,
    "v_head_dim": 8,
    "d_rel": 8,
    "max_position_embeddings": 64,
    "n_ctx": 64,
    "max_seq_len": 64,
    "rotary_dim": 4,
    "sliding_window": 5,
    "sliding_window_size": 5,
    "attention_window_size": 5,
    "window_size": 5,
    "attention_chunk_size": 64,
    "keep_window_size": 16,
    "segment_length": 4,
    "memory_length": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "moe_num_shared_experts": 1,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "o_lora_rank": 8,
    "o_groups": 2,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "index_topk": 8,
    "block_multiple_of": 8,
    "router_hidden_size": 16,
    "gated_norm_rank": 4,
    "loop_gate_rank": 4,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "n_mamba_heads": 2,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_headdim": 8,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "mamba_d_ssm": 64,
    "mamba_dt_rank": 2,
    "time_step_rank": 2,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "n_groups": 2,
    "ngram_vocab_size_base": 64,
    "ple_embed_dim": 16,
    "hc_lowrank": 8,
    "split_ngram_parts": 4,
    "make_ngram_vocab_size_divisible_by": 8,
}
"""Upper limit for each size that a configuration has."""
SHARED = "num_kv_shared_layers"
"""Setting with the number of last layers that reuse keys and values of an earlier layer."""
LAYERS = 4


def small_model(
    config: TransformersModel, *, layers: int = LAYERS, spread: float | None = None
) -> TransformersModel:
    """Return a copy of a configuration with small sizes.

    Args:
        config: configuration of any transformers model.
        layers: maximum number of layers.
        spread: `initializer_range` of the copy; None for the model's.

    Raises:
        ModelError: transformers rejects the small sizes.
    """
    settings = config.settings
    if config.model_type != settings.model_type:
        # Text model of a multimodal model, whose sizes are in `text_config`.
        config = TransformersModel(settings)
        settings = config.settings
    attribute_map: Mapping[str, str] = getattr(settings, "attribute_map", None) or {}
    document: dict[str, Any] = settings.to_dict()
    count = config.num_hidden_layers
    kept_layers = _select_layers(document, count, layers)
    changed: dict[str, Any] = {}
    limits = {attribute_map.get(key, key): limit for key, limit in SMALL.items()}
    for key, value in document.items():
        if key not in TOKENS:
            small = _small_value(key, value, limits, count, kept_layers)
            if small is not value:
                changed[key] = small
    changed[attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(kept_layers)
    if type(shared := document.get(SHARED)) is int:
        changed[SHARED] = sum(layer >= count - shared for layer in kept_layers)
    changed |= _dependent(settings, {**document, **changed}, attribute_map)
    if spread is not None and "initializer_range" in document:
        changed["initializer_range"] = spread
    changed = {key: value for key, value in changed.items() if key in document}
    # Token ids may exceed the small vocabulary. Most model types allow None.
    tokens = {key: document[key] for key in TOKENS if key in document}
    try:
        return config.with_settings({**changed, **dict.fromkeys(tokens)})
    except ModelError:
        ids = {key: 0 if type(value) is int else value for key, value in tokens.items()}
        return config.with_settings({**changed, **ids})


def _select_layers(settings: Mapping[str, Any], count: int, limit: int) -> list[int]:
    """Choose up to `limit` layers, ascending: the first ones, plus one of every other kind."""
    per_layer_lists = [
        value for value in settings.values() if isinstance(value, list) and len(value) == count
    ]
    index_lists = [
        value
        for value in settings.values()
        if isinstance(value, list) and len(value) < count and _are_layers(value, count)
    ]
    overrides: Mapping[str, Any] = settings.get("per_layer_config") or {}
    shared = settings.get(SHARED)
    num_shared = shared if type(shared) is int else 0
    layer_overrides = {
        int(key): str(value) for key, value in overrides.items() if str(key).isdigit()
    }
    # Two layers are of one kind if all their per-layer settings are equal.
    kinds = [
        (
            *(str(value[layer]) for value in per_layer_lists),
            *(layer in value for value in index_lists),
            layer_overrides.get(layer),
            layer >= count - num_shared,
        )
        for layer in range(count)
    ]
    layers = list(range(min(limit, count)))
    new = [kinds.index(kind) for kind in dict.fromkeys(kinds) if kinds.index(kind) not in layers]
    new.sort(key=lambda layer: layer < count - num_shared)  # layers with shared KV first
    for layer in new[: limit - 1]:
        # Replace the last layer that is not the only one of its kind.
        redundant = [
            index
            for index in layers
            if sum(kinds[index] == kinds[layer_index] for layer_index in layers) > 1
        ]
        if redundant:
            layers.remove(redundant[-1])
            layers.append(layer)
    return sorted(layers)


def _are_layers(value: Sequence[Any], count: int) -> bool:
    """Whether a list could be ascending layer indices."""
    in_range = all(type(number) is int and 0 <= number < count for number in value)
    return in_range and list(value) == sorted(set(value))


def _small_value(
    key: str, value: Any, limits: Mapping[str, int], count: int, layers: Sequence[int]
) -> Any:
    """Reduce one setting: lower sizes to their limits, and per-layer values to `layers`."""
    if type(value) is int and key in limits:
        return min(value, limits[key])
    if key == "per_layer_config" and isinstance(value, dict):
        by_layer = {
            int(layer): overrides for layer, overrides in value.items() if str(layer).isdigit()
        }
        return {
            str(index): {
                name: _small_value(name, element, limits, count, layers)
                for name, element in overrides.items()
            }
            for index, layer in enumerate(layers)
            if (overrides := by_layer.get(layer)) is not None
        }
    if isinstance(value, list) and len(value) == count:
        limit = limits.get(key)
        if key == "num_attention_heads_per_layer":
            limit = limits["num_attention_heads"]
        values = [value[layer] for layer in layers]
        all_ints = limit is not None and all(type(element) is int for element in values)
        if all_ints and limit is not None:
            return [min(element, limit) for element in values]
        return values
    layer_list = key.endswith(("_layers", "_layer_ids", "_idxs"))
    if isinstance(value, list) and value and layer_list and _are_layers(value, count):
        return [index for index, layer in enumerate(layers) if layer in value]
    return value


def _dependent(
    settings: Any, small: Mapping[str, Any], attribute_map: Mapping[str, str]
) -> dict[str, Any]:
    """Settings that follow from the small sizes: key-value heads, and sums of widths."""
    changed: dict[str, Any] = {}
    heads_name = attribute_map.get("num_attention_heads", "num_attention_heads")
    heads = small.get(heads_name)
    keys = getattr(settings, "num_key_value_heads", None)
    if type(keys) is int and type(heads) is int:
        grouped = keys < settings.num_attention_heads
        name = attribute_map.get("num_key_value_heads", "num_key_value_heads")
        changed[name] = max(1, heads // 2) if grouped else heads
    if small.get("num_key_value_heads", 0) is None and type(heads) is int:
        changed["num_key_value_heads"] = heads  # None is not supported by every model type
    # Some MoE types have no default expert count and do not run without one.
    if small.get("n_routed_experts", 0) is None:
        changed |= {"n_routed_experts": SMALL["n_routed_experts"], "n_shared_experts": 1}
    if small.get("num_experts_per_tok", 0) is None:
        changed["num_experts_per_tok"] = SMALL["num_experts_per_tok"]
    width = small.get("hidden_size")
    if small.get("head_dim", 0) is None and type(width) is int and type(heads) is int:
        changed["head_dim"] = width // heads  # not derived by every model type
    if type(small.get("qk_head_dim")) is int:
        changed["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    rotary = getattr(settings, "qk_rope_head_dim", None)
    if rotary is not None and getattr(settings, "head_dim", None) == rotary:
        changed["head_dim"] = small["qk_rope_head_dim"]  # rotary tables cover these dims only
    if getattr(settings, "attention_hidden_size", None) == 2 * settings.hidden_size:
        # Zamba2: attention over the hidden state concatenated with the embedding.
        changed["attention_hidden_size"] = 2 * small["hidden_size"]
        changed["attention_head_dim"] = 2 * small["hidden_size"] // small[heads_name]
        changed["mamba_headdim"] = (
            int(small["mamba_expand"] * small["hidden_size"]) // small["n_mamba_heads"]
        )
    return changed
