"""Write compressed-tensors folders in Hugging Face format, for transformers and vLLM.

Integer codes are `pack-quantized`: the codes of a row plus 2^(bits-1) form a bit stream in int32
words, lowest bits first. With 8 bits and rounded inputs they are `int-quantized`, one per byte. So
are E4M3 codes; two E2M1 codes share a byte, the first one in its low half. E8M0 scales are bytes.
Source: compressed-tensors, `pack_to_int32`, `pack_fp4_to_uint8` and `QuantizationConfig`.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ms_compress.errors import LayerError
from ms_compress.files.durable import sync_folder, write_synced
from ms_compress.files.safetensors_file import TensorEntry, WeightFile
from ms_compress.models.decoder_config import check_deployable
from ms_compress.models.head import HEAD
from ms_compress.models.logits import evaluating
from ms_compress.models.shards import WholeTensor
from ms_compress.models.whole_model import WholeModel
from ms_compress.quantization.layers import prepared_layers
from ms_compress.quantization.rounding import QuantizedWeight, calibrated_scale
from ms_compress.quantization.scheme import E2M1, KV_CACHE, Activations, Scheme
from ms_compress.targets.ct import llama4_experts
from ms_compress.targets.ct.cpu import warn_without_vnni
from ms_compress.targets.target import Assets, has_kv_cache_scales

logger = logging.getLogger(__name__)

FILE = "model.safetensors"
EXPERT = re.compile(r"\.experts\.\d+\.")
"""Pattern of the tensor names of an expert."""
INTEGER_FORMATS = ("pack-quantized", "int-quantized")
BFLOAT16_FORMATS = ("mxfp8-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized")
"""Formats that compressed-tensors dequantizes to bfloat16, which has the exact values."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of E2M1 in the order of their bits."""


def check(model: WholeModel, assets: Assets) -> None:
    """Check that the format can store the model.

    Raises:
        ExportError: transformers does not have this architecture.
        LayerError: an embedding is quantized, or only some layers round their inputs.
    """
    check_deployable(model.config)
    for entry in model.tensors.values():
        if entry.scheme is not None and entry.kind != "linear":
            raise LayerError(
                f"{entry.module}: compressed-tensors cannot store a quantized embedding that"
                " transformers reads; prepare the model without embeddings, and untie the head"
            )
    for entry in model.tensors.values():
        rule = entry.activations
        if rule is not None and rule.is_calibrated and not entry.input_peak:
            raise LayerError(
                f"{entry.module}: {entry.scheme} needs a calibrated input scale, but no inputs were"
                " observed; call calibrate_inputs(model, batches) or train the model first"
            )
    _check_experts(model)
    _check_input_shapes(model)
    quantized = [entry for entry in model.tensors.values() if entry.scheme is not None]
    rounding = [entry.module for entry in quantized if entry.activations is not None]
    plain = [entry.module for entry in quantized if entry.activations is None]
    if rounding and plain:
        raise LayerError(
            f"{rounding[0]} rounds its input and {plain[0]} does not, but one scheme is written for"
            " all layers; prepare them alike"
        )


def _check_experts(model: WholeModel) -> None:
    """Check that transformers reads separate experts correctly, as it fuses them when loading.

    Raises:
        LayerError: transformers would ignore the global scale of each expert.
    """
    for entry in model.tensors.values():
        if entry.scheme is None or not EXPERT.search(entry.name):
            continue
        if entry.scheme.strategy == "tensor_group":
            raise LayerError(
                f"{entry.module}: the scheme of an expert must have no per-tensor scale, which"
                f" transformers silently ignores, got {entry.scheme}; use ct.mxfp4a16 or"
                " ct.int4_g32"
            )
        if entry.scheme.num_bits == 8 or not entry.scheme.symmetric:
            logger.warning(
                "transformers cannot read experts of %s, or reads them without rounding their "
                "inputs; serve the folder with vLLM, or use ct.int4_g32 or ct.mxfp4a16",
                entry.scheme,
            )
            return


def _check_input_shapes(model: WholeModel) -> None:
    """Check that transformers would round the inputs of all layers with one scale per token.

    Raises:
        LayerError: it would not; the message names the first such layer.
    """
    rounding = {entry.module for entry in model.tensors.values() if entry.activations is not None}
    for name in sorted(rounding):
        # transformers gives it (B, 1, S, K); ms-parallel's own module gives it (B, S, K).
        if model.config.get("model_type") == "deepseek_v3" and name.endswith(".kv_b_proj"):
            raise LayerError(
                f"{name}: its input in transformers has shape (B, 1, S, K), for which"
                " compressed-tensors shares activation scales between tokens; name the layer as an"
                " exception, such as '*.kv_b_proj'"
            )
    (stage, *others) = model.stages
    is_complete = not others and getattr(stage, "first", True) and getattr(stage, "last", True)
    layers = [layer for _, layer in prepared_layers(stage)]
    if is_complete and any(layer.input_ndim is not None and layer.activations for layer in layers):
        no_cache = {"use_cache": False} if hasattr(stage.config, "to_dict") else {}
        device = next(stage.parameters()).device
        with evaluating(stage), torch.no_grad():  # layers raise for inputs with other dims
            stage(torch.zeros(1, 2, dtype=torch.int64, device=device), **no_cache)


def write(model: WholeModel, folder: Path, assets: Assets, accuracy_level: int) -> None:
    """Write the files into an existing folder; all ranks call it, and rank 0 writes."""
    if model.is_first and any(entry.activations for entry in model.tensors.values()):
        warn_without_vnni()
    # Reads are collective: every rank makes the same ones in this order.
    passes = list(_passes(model))
    if not model.is_first:
        for entry, _ in passes:
            model.read(entry.name)
        return
    # The header comes first, so all tensors are declared before any is read.
    with WeightFile(folder / FILE, (tensor for _, stored in passes for tensor in stored)) as file:
        for entry, stored in passes:
            value = model.read(entry.name)
            assert value is not None
            tensors = _tensors(entry, value, model.config)
            for tensor in stored:
                file.write(tensor.name, tensors[tensor.name])
    dtype_key = "torch_dtype" if "torch_dtype" in model.config else "dtype"
    quantization = _quantization(model)
    # With a narrower dtype, transformers would round float32 scales to it; with a wider one, its
    # layers would reject weights that are dequantized to bfloat16.
    dtype = "bfloat16" if quantization["format"] in BFLOAT16_FORMATS else "float32"
    config = {**model.config, dtype_key: dtype, "quantization_config": quantization}
    text = json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"
    write_synced(folder / "config.json", text)
    sync_folder(folder)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (N, K) int8, offset by 2^(bits-1), into (N, ceil(K · bits / 32)) int32."""
    unsigned = (codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8).numpy()  # (N, K)
    # (N, K, bits), lowest bit first, then the bit stream of each row, padded to whole words.
    stream = np.unpackbits(unsigned[..., None], axis=-1, bitorder="little")[..., :bits]
    flat = stream.reshape(len(unsigned), -1)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    words = np.packbits(flat, axis=-1, bitorder="little").view("<i4")
    return torch.from_numpy(words.astype(np.int32))


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack E2M1 codes (N, K) of any floating-point dtype into (N, K / 2) uint8."""
    values = codes.float()
    bits = torch.bucketize(values.abs(), torch.tensor(E2M1_VALUES)) + 8 * values.signbit()
    return (bits[:, ::2] | (bits[:, 1::2] << 4)).to(torch.uint8)


def _passes(model: WholeModel) -> Iterator[tuple[WholeTensor, list[TensorEntry]]]:
    """Yield the tensors to write, widest dtypes first, so that every tensor is aligned."""
    for size in (8, 4, 2, 1):
        for entry in model.tensors.values():
            tensors = _stored(entry, model.config)
            stored = [tensor for tensor in tensors if tensor.dtype.itemsize == size]
            if stored:
                yield entry, stored


def _stored(entry: WholeTensor, config: Mapping[str, Any]) -> Iterator[TensorEntry]:
    """Yield the tensors in the file for one tensor of the model."""
    if llama4_experts.is_fused(entry.name, config):
        shape = llama4_experts.stored_shape(entry.name, entry.shape)
        for name in llama4_experts.stored_names(entry.name, entry.shape[0]):
            yield TensorEntry(name=name, shape=shape, dtype=entry.dtype)
        return
    if entry.scheme is None:
        yield TensorEntry(name=entry.name, shape=entry.shape, dtype=entry.dtype)
        return
    rows, features = entry.shape
    prefix, scheme, storage = f"{entry.module}.weight", entry.scheme, _format(entry)
    if storage == "pack-quantized":
        packed = (rows, -(-features * scheme.num_bits // 32))
        yield TensorEntry(name=f"{prefix}_shape", shape=(2,), dtype=torch.int64)
        yield TensorEntry(name=f"{prefix}_packed", shape=packed, dtype=torch.int32)
    elif scheme.element is E2M1:
        yield TensorEntry(name=f"{prefix}_packed", shape=(rows, features // 2), dtype=torch.uint8)
    else:
        yield TensorEntry(name=entry.name, shape=entry.shape, dtype=scheme.code_dtype)
    scale_shape = scheme.scale_shape(rows, features)
    scale_dtype = torch.uint8 if scheme.dtype == torch.float8_e8m0fnu else scheme.dtype
    yield TensorEntry(
        name=f"{prefix}_scale",
        shape=(1,) if scheme.strategy == "tensor" else scale_shape,
        dtype=scale_dtype,
    )
    if not scheme.symmetric:
        zeros = (-(-rows * scheme.num_bits // 32), scale_shape[1])
        yield TensorEntry(name=f"{prefix}_zero_point", shape=zeros, dtype=torch.int32)
    if scheme.strategy == "tensor_group":
        yield TensorEntry(name=f"{prefix}_global_scale", shape=(1,), dtype=torch.float32)
    if entry.activations is not None and entry.activations.is_calibrated:
        yield TensorEntry(name=_input_scale_name(entry), shape=(1,), dtype=torch.float32)


def _tensors(
    entry: WholeTensor, value: QuantizedWeight | Tensor, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    if isinstance(value, Tensor) and llama4_experts.is_fused(entry.name, config):
        return llama4_experts.split(entry.name, value)
    if isinstance(value, Tensor):
        return {entry.name: value}
    assert entry.scheme is not None
    prefix, scheme, storage = f"{entry.module}.weight", entry.scheme, _format(entry)
    scales = value.scales.flatten() if scheme.strategy == "tensor" else value.scales
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    tensors = {f"{prefix}_scale": scales}
    if storage == "pack-quantized":
        tensors[f"{prefix}_shape"] = torch.tensor(entry.shape)
        tensors[f"{prefix}_packed"] = pack(value.codes, scheme.num_bits)
    elif scheme.element is E2M1:
        tensors[f"{prefix}_packed"] = pack_e2m1(value.codes)
    else:
        tensors[entry.name] = value.codes
    if value.zeros is not None:
        # Zero points are packed along the rows of the weight.
        tensors[f"{prefix}_zero_point"] = pack(value.zeros.t().contiguous(), scheme.num_bits).t()
    if value.global_scale is not None:
        tensors[f"{prefix}_global_scale"] = value.global_scale
    if entry.activations is not None and entry.input_peak is not None:
        peak = torch.tensor(entry.input_peak)
        tensors[_input_scale_name(entry)] = calibrated_scale(peak, entry.activations)
    return tensors


def _input_scale_name(entry: WholeTensor) -> str:
    assert entry.activations is not None
    suffix = "input_global_scale" if entry.activations.dynamic == "local" else "input_scale"
    return f"{entry.module}.{suffix}"


def _quantization(model: WholeModel) -> dict[str, Any]:
    """Return the `quantization_config` of config.json."""
    weights = [entry for entry in model.tensors.values() if entry.name.endswith(".weight")]
    linear = [entry for entry in weights if entry.kind == "linear"]
    scheme, first = next((entry.scheme, entry) for entry in linear if entry.scheme is not None)
    ignored = [entry.module for entry in linear if entry.scheme is None]
    for entry in model.tensors.values():
        if llama4_experts.is_fused(entry.name, model.config):
            names = llama4_experts.stored_names(entry.name, entry.shape[0])
            ignored += [name.removesuffix(".weight") for name in names]
    # Routers are linear layers in vLLM.
    ignored += [
        entry.module
        for entry in weights
        if entry.kind == "other" and len(entry.shape) == 2 and entry.scheme is None
    ]
    if model.is_tied:
        # A tied head is an nn.Linear as well, but the file has no codes for it.
        ignored.append(HEAD)
    storage = _format(first)
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": _arguments(scheme),
        "input_activations": first.activations and _arguments(first.activations),
        "output_activations": None,
    }
    if storage not in INTEGER_FORMATS or scheme.format is not None:
        group["format"] = storage  # otherwise the library infers it
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": _arguments(KV_CACHE) if has_kv_cache_scales(model) else None,
        "ignore": ignored,
        "config_groups": {"group_0": group},
    }


def _format(entry: WholeTensor) -> str:
    """Return the library's name of the format in which a weight is stored."""
    assert entry.scheme is not None
    if entry.scheme.format is not None:
        return entry.scheme.format
    # transformers needs rounded inputs for unpacked integer codes.
    packed = entry.scheme.num_bits < 8 or entry.activations is None
    return "pack-quantized" if packed else "int-quantized"


def _arguments(rule: Scheme | Activations) -> dict[str, Any]:
    """Return the library's `QuantizationArgs` for a weight or an input."""
    dynamic = False if isinstance(rule, Scheme) else rule.dynamic
    arguments: dict[str, Any] = {
        "num_bits": rule.num_bits,
        "type": rule.type,
        "symmetric": rule.symmetric if isinstance(rule, Scheme) else True,
        "strategy": rule.strategy,
        "group_size": rule.group_size,
        "dynamic": dynamic,
        "actorder": None,
        "block_structure": rule.block_structure if isinstance(rule, Scheme) else None,
        "observer": None if dynamic is True else "minmax",
        "observer_kwargs": {},
    }
    # The library computes with E8M0 scales as uint8 exponents; other narrow dtypes have their name.
    if rule.scale_dtype == "float8_e8m0fnu":
        arguments["scale_dtype"] = "torch.uint8"
    elif rule.scale_dtype == "float8_e4m3fn":
        arguments["scale_dtype"] = "torch.float8_e4m3fn"
    return arguments
