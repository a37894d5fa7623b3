"""Small configurations of transformers' models, for proofs, tests and the sweep.

A default configuration has sizes of a published model. Here every size is lowered to a few dozen,
and per-layer settings are cut to a few layers that keep one layer of each kind.
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
"""Upper limit of each size; a configuration has some of these settings."""
SHARED = "num_kv_shared_layers"
"""Number of last layers that take keys and values of an earlier layer."""
LAYERS = 4


def small_model(
    config: TransformersModel, *, layers: int = LAYERS, spread: float | None = None
) -> TransformersModel:
    """Copy a configuration with small sizes.

    Args:
        config: any model of transformers.
        layers: number of layers to keep.
        spread: `initializer_range` of the copy; None keeps the model's.

    Raises:
        ModelError: transformers rejects the small sizes.
    """
    settings = config.settings
    if config.model_type != settings.model_type:
        # The text part of a model that takes other inputs too: its sizes are in `text_config`.
        config = TransformersModel(settings)
        settings = config.settings
    attribute_map: Mapping[str, str] = getattr(settings, "attribute_map", None) or {}
    document: dict[str, Any] = settings.to_dict()
    count, kept_layers = (
        config.num_hidden_layers,
        _layers(document, config.num_hidden_layers, layers),
    )
    changed: dict[str, Any] = {}
    limits = {attribute_map.get(key, key): most for key, most in SMALL.items()}
    for key, value in document.items():
        if key not in TOKENS:
            small = _small(key, value, limits, count, kept_layers)
            if small is not value:
                changed[key] = small
    changed[attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(kept_layers)
    if type(shared := document.get(SHARED)) is int:
        changed[SHARED] = sum(layer >= count - shared for layer in kept_layers)
    changed |= _related(settings, {**document, **changed}, attribute_map)
    if spread is not None and "initializer_range" in document:
        changed["initializer_range"] = spread
    changed = {key: value for key, value in changed.items() if key in document}
    # Token ids may be outside the small vocabulary. Most types allow None.
    tokens = {key: document[key] for key in TOKENS if key in document}
    try:
        return config.with_settings({**changed, **dict.fromkeys(tokens)})
    except ModelError:
        ids = {key: 0 if type(value) is int else value for key, value in tokens.items()}
        return config.with_settings({**changed, **ids})


def _layers(given: Mapping[str, Any], count: int, most: int) -> list[int]:
    """Choose up to `most` layers, in order: the first layers, and one of each further kind."""
    lists = [value for value in given.values() if isinstance(value, list) and len(value) == count]
    numbered = [
        value
        for value in given.values()
        if isinstance(value, list) and len(value) < count and _are_layers(value, count)
    ]
    per_layer: Mapping[str, Any] = given.get("per_layer_config") or {}
    shared = given.get(SHARED)
    last = shared if type(shared) is int else 0
    of_layer = {int(key): str(value) for key, value in per_layer.items() if str(key).isdigit()}
    kinds = [
        (
            *(str(value[layer]) for value in lists),
            *(layer in value for value in numbered),
            of_layer.get(layer),
            layer >= count - last,
        )
        for layer in range(count)
    ]
    chosen = list(range(min(most, count)))
    new = [kinds.index(kind) for kind in dict.fromkeys(kinds) if kinds.index(kind) not in chosen]
    new.sort(key=lambda layer: layer < count - last)  # layers that share keys and values first
    for layer in new[: most - 1]:
        # Replace the last layer whose kind stays present without it.
        spare = [
            index
            for index in chosen
            if sum(kinds[index] == kinds[other_index] for other_index in chosen) > 1
        ]
        if spare:
            chosen.remove(spare[-1])
            chosen.append(layer)
    return sorted(chosen)


def _are_layers(value: Sequence[Any], count: int) -> bool:
    """Return whether a list may be ascending layer numbers."""
    in_range = all(type(number) is int and 0 <= number < count for number in value)
    return in_range and list(value) == sorted(set(value))


def _small(
    key: str, value: Any, known: Mapping[str, int], count: int, chosen: Sequence[int]
) -> Any:
    if type(value) is int and key in known:
        return min(value, known[key])
    if key == "per_layer_config" and isinstance(value, dict):
        cut = {int(layer): overrides for layer, overrides in value.items() if str(layer).isdigit()}
        return {
            str(index): {
                name: _small(name, element, known, count, chosen)
                for name, element in overrides.items()
            }
            for index, layer in enumerate(chosen)
            if (overrides := cut.get(layer)) is not None
        }
    if isinstance(value, list) and len(value) == count:
        most = known.get(key)
        if key == "num_attention_heads_per_layer":
            most = known["num_attention_heads"]
        cuts = [value[layer] for layer in chosen]
        all_ints = most is not None and all(type(element) is int for element in cuts)
        return [min(element, most) for element in cuts] if all_ints and most is not None else cuts
    layer_list = key.endswith(("_layers", "_layer_ids", "_idxs"))
    if isinstance(value, list) and value and layer_list and _are_layers(value, count):
        return [index for index, layer in enumerate(chosen) if layer in value]
    return value


def _related(settings: Any, small: Mapping[str, Any], written: Mapping[str, str]) -> dict[str, Any]:
    """Return settings that depend on others: grouped heads, and sums of widths."""
    changed: dict[str, Any] = {}
    heads_name = written.get("num_attention_heads", "num_attention_heads")
    heads = small.get(heads_name)
    keys = getattr(settings, "num_key_value_heads", None)
    if type(keys) is int and type(heads) is int:
        grouped = keys < settings.num_attention_heads
        name = written.get("num_key_value_heads", "num_key_value_heads")
        changed[name] = max(1, heads // 2) if grouped else heads
    if small.get("num_key_value_heads", 0) is None and type(heads) is int:
        changed["num_key_value_heads"] = heads  # not every type takes None for all heads
    # Some types with experts have no default for their number, and do not run without one.
    if small.get("n_routed_experts", 0) is None:
        changed |= {"n_routed_experts": SMALL["n_routed_experts"], "n_shared_experts": 1}
    if small.get("num_experts_per_tok", 0) is None:
        changed["num_experts_per_tok"] = SMALL["num_experts_per_tok"]
    width = small.get("hidden_size")
    if small.get("head_dim", 0) is None and type(width) is int and type(heads) is int:
        changed["head_dim"] = width // heads  # not every type derives it
    if type(small.get("qk_head_dim")) is int:
        changed["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    rotary = getattr(settings, "qk_rope_head_dim", None)
    if rotary is not None and getattr(settings, "head_dim", None) == rotary:
        changed["head_dim"] = small["qk_rope_head_dim"]  # only the rotary part has a table
    if getattr(settings, "attention_hidden_size", None) == 2 * settings.hidden_size:
        # Zamba2: attention over a hidden state and the embedding next to it.
        changed["attention_hidden_size"] = 2 * small["hidden_size"]
        changed["attention_head_dim"] = 2 * small["hidden_size"] // small[heads_name]
        changed["mamba_headdim"] = (
            int(small["mamba_expand"] * small["hidden_size"]) // small["n_mamba_heads"]
        )
    return changed
