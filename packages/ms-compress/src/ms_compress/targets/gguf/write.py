"""Write GGUF files for llama.cpp with the `gguf` library.

llama.cpp rotates adjacent pairs where Hugging Face's Llama rotates halves, so the rows of q and k
are permuted, together with their scales and biases. Source: convert_hf_to_gguf.py, `permute`.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve
from torch import Tensor

from ms_compress.errors import ExportError, LayerError
from ms_compress.models.decoder_config import (
    EXPERT_FAMILIES,
    FAMILIES,
    DecoderConfig,
    check_names,
    decoder_config,
)
from ms_compress.models.shards import WholeTensor
from ms_compress.models.whole_model import WholeModel
from ms_compress.quantization.rounding import QuantizedWeight
from ms_compress.targets.gguf.blocks import pack
from ms_compress.targets.gguf.tokenizer import add_placeholders, add_tokenizer, check_tokenizer
from ms_compress.targets.libraries import import_library
from ms_compress.targets.target import Assets

FILE = "model.gguf"
MODEL_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
"""Tensors that stack a matrix of all experts."""
ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
"""llama.cpp's name of a family, if it differs."""
SUPPORTED_FAMILIES = (*FAMILIES, *EXPERT_FAMILIES)
"""Families that this target supports."""
PERMUTED = ("llama", "mistral", "mixtral")
"""Families that llama.cpp computes with rotation of adjacent pairs."""
FILE_TYPES = {
    None: "ALL_F32",
    "Q3_K": "MOSTLY_Q3_K_M",
    "Q4_K": "MOSTLY_Q4_K_M",
    "Q5_K": "MOSTLY_Q5_K_M",
    "MXFP4": "MOSTLY_MXFP4_MOE",
}
"""The library's file type for a most common tensor type, if it is not `MOSTLY_<type>`."""


def library() -> Any:
    """Import the `gguf` library; ExportError if it is not installed."""
    return import_library("gguf", extra="gguf", purpose="GGUF files need the gguf library")


def check(model: WholeModel, assets: Assets) -> None:
    """Check that llama.cpp supports the model.

    Raises:
        ExportError: it does not support the model or its tokenizer.
        LayerError: it does not support a tensor.
    """
    library()
    config = decoder_config(model.config, "GGUF", SUPPORTED_FAMILIES)
    window = next((window for window in config.windows if window is not None), None)
    if window is not None:
        raise ExportError(
            f"GGUF: sliding_window must be null, as llama.cpp does not apply it to {config.family},"
            f" got {window}; set it to null if texts are shorter"
        )
    check_names(model.tensors, "GGUF", experts=config.experts > 0)
    for name, entries in _stacked(model).items():
        if len({entry.scheme for entry in entries}) > 1:
            raise LayerError(
                f"{entries[0].module} and the other experts of its layer are one tensor, {name}, in"
                " GGUF, but are not quantized alike; name all of them as exceptions, or none"
            )
    if assets.tokenizer is not None:
        check_tokenizer(assets.tokenizer, assets.ends, config.vocabulary)


def _stacked(model: WholeModel) -> dict[str, list[WholeTensor]]:
    """Group the model's tensors by their tensor in the file, which stacks all experts."""
    stored: dict[str, list[WholeTensor]] = {}
    for entry in model.tensors.values():
        stored.setdefault(tensor_name(entry.name), []).append(entry)
    return stored


def write(model: WholeModel, folder: Path, assets: Assets, accuracy_level: int) -> None:
    """Write `model.gguf` in an existing folder; all ranks call it, and rank 0 writes."""
    config = decoder_config(model.config, "GGUF", SUPPORTED_FAMILIES)
    stored = _stacked(model)
    if not model.is_first:
        for entries in stored.values():
            for entry in entries:
                model.read(entry.name)
        return
    gguf = library()
    architecture = ARCHITECTURES.get(config.family, config.family)
    with closing(gguf.GGUFWriter(None, architecture)) as writer:
        _add_metadata(writer, gguf, config, model)
        if assets.tokenizer is None:
            add_placeholders(writer, gguf, assets.ends, config.vocabulary)
        else:
            add_tokenizer(writer, gguf, assets.tokenizer, assets.ends, config.vocabulary)
        divisors = config.frequency_divisors
        if divisors is not None:
            # Divisors of the rotary frequencies, such as Llama 3's, are a tensor of the file.
            _add_info(writer, gguf, "rope_freqs.weight", (len(divisors),), None)
        # All names, shapes and offsets precede the data, so they are declared before any tensor is
        # read, and the data follow in the same order.
        for name, entries in stored.items():
            experts = (len(entries),) if name.endswith("_exps.weight") else ()
            _add_info(writer, gguf, name, (*experts, *entries[0].shape), entries[0])
        writer.write_header_to_file(path=folder / FILE)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if divisors is not None:
            writer.write_tensor_data(np.array(divisors, dtype=np.float32))
        for entries in stored.values():
            values = [_bytes(entry, _read(model, entry), config) for entry in entries]
            writer.write_tensor_data(values[0] if len(values) == 1 else np.stack(values))


def _read(model: WholeModel, entry: WholeTensor) -> QuantizedWeight | Tensor:
    value = model.read(entry.name)
    assert value is not None
    return value


def tensor_name(name: str) -> str:
    """Return llama.cpp's name of a Hugging Face parameter."""
    module, _, suffix = name.rpartition(".")
    if module in MODEL_TENSORS:
        return f"{MODEL_TENSORS[module]}.{suffix}"
    _, _, layer, part = module.split(".", 3)
    if ".experts." in part:
        return f"blk.{layer}.{EXPERTS[part.rpartition('.')[2]]}.{suffix}"
    return f"blk.{layer}.{LAYER_TENSORS[part]}.{suffix}"


def permuted(rows: Tensor, heads: int) -> Tensor:
    """Permute rows (heads · D, ...) of q or k to llama.cpp's order: 0, D/2, 1, D/2 + 1, ..."""
    split = rows.reshape(heads, 2, -1, *rows.shape[1:])  # (heads, 2, D / 2, ...)
    return split.transpose(1, 2).reshape(rows.shape)  # the halves interleave


def _bytes(entry: WholeTensor, value: QuantizedWeight | Tensor, config: DecoderConfig) -> Any:
    heads = None
    if config.family in PERMUTED:
        part = entry.module.rpartition(".")[2]
        heads = {"q_proj": config.heads, "k_proj": config.key_heads}.get(part)
    if isinstance(value, Tensor):
        plain = value.float() if heads is None else permuted(value.float(), heads)
        return plain.contiguous().numpy()
    assert entry.scheme is not None
    if heads is not None:
        rows: dict[str, Any] = {
            name: permuted(part, heads) for name, part in value.row_parts.items()
        }
        value = evolve(value, **rows)
    return pack(value)


def _add_info(
    writer: Any, gguf: Any, name: str, shape: tuple[int, ...], entry: WholeTensor | None
) -> None:
    count = int(np.prod(shape))
    if entry is None or entry.scheme is None:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * count)
        return
    ggml_type = gguf.GGMLQuantizationType[entry.scheme.format]
    block, size = gguf.GGML_QUANT_SIZES[ggml_type]
    # The library needs the shape in bytes: `size` bytes for each block of weights.
    stored = (*shape[:-1], shape[-1] // block * size)
    nbytes = int(np.prod(stored))
    writer.add_tensor_info(name, stored, np.dtype(np.uint8), nbytes, raw_dtype=ggml_type)


def _add_metadata(writer: Any, gguf: Any, config: DecoderConfig, model: WholeModel) -> None:
    """Add the metadata of the model that llama.cpp needs."""
    writer.add_type("model")
    writer.add_block_count(config.layers)
    writer.add_context_length(config.positions)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.inner)
    if config.experts:
        writer.add_expert_count(config.experts)
        writer.add_expert_used_count(config.experts_per_token)
        writer.add_expert_feed_forward_length(config.inner)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.key_heads)
    writer.add_key_length(config.head_width)
    writer.add_value_length(config.head_width)
    writer.add_rope_dimension_count(config.head_width)
    writer.add_rope_freq_base(config.theta)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_vocab_size(config.vocabulary)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    schemes = [entry.scheme for entry in model.tensors.values() if entry.scheme is not None]
    common = max(schemes, key=schemes.count).format if schemes else None
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES.get(common, f"MOSTLY_{common}")])
    if config.linear_factor is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.linear_factor)
