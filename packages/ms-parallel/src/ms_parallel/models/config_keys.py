"""Classification of config.json keys as used, without effect, or unsupported.

An unknown key might change the model's logits, so it is rejected by name instead of ignored.
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

from attrs import frozen

from ms_parallel.errors import ModelError

_COMMON_KEYS = frozenset(
    {
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "tie_word_embeddings",
        "max_position_embeddings",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
)

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "is_causal": (True,),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False,),
    "use_mrope": (False, None),
    "no_rope_layers": (None, []),
    "no_rope_layer_interval": (None,),
    "per_layer_config": (None, {}),
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
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "torchscript": (False, None),
    # Settings of other families:
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "layer_types": (None,),
    "use_sliding_window": (False,),
}
"""Keys that could change the computation, with the values that have no effect."""

_IGNORED_KEYS = frozenset(
    {
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "_flash_attn_2_enabled",
        "architectures",
        "attention_dropout",  # dropout is never applied
        "auto_map",  # ignored by readers with native code for the family
        "chunk_size_feed_forward",  # splits a computation without changing its result
        "dtype",
        "finetuning_task",
        "id2label",
        "is_decoder",
        "is_llama_config",
        "label2id",
        "max_sequence_length",
        "model_max_length",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "prefix",
        "pretraining_tp",  # splits a computation without changing its result
        "problem_type",
        "return_dict",
        "sep_token_id",
        "decoder_start_token_id",
        "task_specific_params",
        "tf_legacy_loss",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "use_return_dict",
    }
)
"""Keys that do not affect the logits at any value."""

_GENERATION_KEYS = frozenset(
    {
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "target_lookbehind",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }
)
"""Sampling settings in older files, which do not affect the logits."""


def check_keys(
    family: str,
    used: frozenset[str],
    neutral: Mapping[str, tuple[object, ...]],
    document: Mapping[str, Any],
) -> None:
    """Check that every key is used or has no effect at its value.

    Args:
        family: name of the model family.
        used: keys that the family reads in addition to the common ones.
        neutral: values without effect for this family, overriding the common table.
        document: decoded config.json.

    Raises:
        ModelError: a key might change the model's logits; names the first.
    """
    quantization_of(document)
    all_keys = _COMMON_KEYS | used | _IGNORED_KEYS | _GENERATION_KEYS | {"quantization_config"}
    neutral = {**_NEUTRAL, **neutral}
    for name, value in document.items():
        if name in all_keys:
            continue
        shown = repr(value)[:60]
        if name not in neutral:
            raise ModelError(
                f"{name[:60]}={shown} is not supported: {family} does not have this key, and it"
                " might change the model's logits; remove it if it has no effect"
            )
        if value not in neutral[name]:
            supported = " or ".join(map(repr, neutral[name]))
            raise ModelError(f"{name}={shown} is not supported; only {supported} is")


@frozen(kw_only=True)
class Quantization:
    """Weight quantization of a checkpoint folder."""

    method: Literal["fp8", "mxfp4"]
    block: tuple[int, int] = (128, 128)
    """fp8: rows and columns of a block with one scale."""


_METHOD_KEYS: Mapping[str, frozenset[str]] = {
    "fp8": frozenset({"weight_block_size", "activation_scheme", "fmt", "scale_fmt"}),
    "mxfp4": frozenset(),
}
"""Supported keys of `quantization_config` by method, in addition to the common ones."""


def quantization_of(document: Mapping[str, Any]) -> Quantization | None:
    """Read the quantization of a checkpoint from its config.json; None if it is not quantized.

    Raises:
        ModelError: the quantization is not supported.
    """
    section = document.get("quantization_config")
    if section is None:
        return None
    method = section.get("quant_method") if isinstance(section, dict) else None
    settings = _METHOD_KEYS.get(method) if isinstance(method, str) else None
    if settings is None:
        raise ModelError(
            f"quant_method must be {' or '.join(_METHOD_KEYS)}, or quantization_config absent, got"
            f" quantization_config={repr(section)[:60]}"
        )
    supported = settings | {"quant_method", "modules_to_not_convert", "dequantize"}
    block = section.get("weight_block_size", [128, 128])
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or any(type(size) is not int or not 0 < size <= 1 << 20 for size in block):
        raise ModelError(
            "weight_block_size in quantization_config must be [rows, columns], got"
            f" {repr(block)[:60]}"
        )
    for name, values in (("activation_scheme", ("dynamic", None)), ("fmt", ("e4m3", None))):
        if section.get(name) not in values:
            raise ModelError(
                f"quantization_config has {name}={repr(section[name])[:60]}; only {values[0]!r} is"
                " supported"
            )
    unknown = sorted(key for key in section if key not in supported)
    if unknown:
        raise ModelError(
            f"quantization_config has {unknown[0][:60]!r}, which is not supported for {method};"
            f" supported: {', '.join(sorted(supported))}"
        )
    return Quantization(method=cast(Any, method), block=(block[0], block[1]))
