"""Folders of Hugging Face compressed-tensors, for transformers and vLLM.

Weights are `pack-quantized`: a row's codes, plus 2^(bits-1), as a stream of bits in int32 words,
the first in the lowest bits. With 8 bits and rounded inputs they are `int-quantized`.
Source: compressed-tensors, `pack_to_int32` and `QuantizationConfig`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ms_compress.errors import LayerError
from ms_compress.files.durable import sync_folder, write_synced
from ms_compress.models.decoder_config import check_deployable
from ms_compress.models.head import HEAD
from ms_compress.models.shards import WholeTensor
from ms_compress.models.whole_model import WholeModel
from ms_compress.quantisation.rounding import Quantised
from ms_compress.quantisation.scheme import Activations, Scheme
from ms_compress.targets.ct.safetensors_file import Slot, TensorFile
from ms_compress.targets.target import Assets

__all__ = ["FILE", "check", "pack", "write"]

FILE = "model.safetensors"


def check(model: WholeModel, assets: Assets) -> None:
    """Refuse what the format has no place for.

    Raises:
        ExportError: transformers has no such model.
        LayerError: an embedding is quantised, or some layers round their inputs and some do not.
    """
    check_deployable(model.config)
    for entry in model.tensors.values():
        if entry.scheme is not None and entry.kind != "linear":
            raise LayerError(
                f"{entry.module}: compressed-tensors holds no quantised embedding that"
                " transformers reads; prepare the model without embeddings, and untie the head"
            )
    quantised = [entry for entry in model.tensors.values() if entry.scheme is not None]
    rounding = [entry.module for entry in quantised if entry.activations is not None]
    plain = [entry.module for entry in quantised if entry.activations is None]
    if rounding and plain:
        raise LayerError(
            f"{rounding[0]} rounds its input and {plain[0]} does not; one scheme is written for all"
            " layers: prepare them alike"
        )


def write(model: WholeModel, folder: Path, assets: Assets, accuracy_level: int) -> None:
    """Write the files of a folder that exists; all processes call it, the first one writes."""
    passes = list(_passes(model.tensors))
    if not model.is_first:
        for entry, _ in passes:
            model.read(entry.name)
        return
    slots = {name: slot for _, places in passes for name, slot in places.items()}
    with TensorFile(folder / FILE, slots) as file:
        for entry, places in passes:
            value = model.read(entry.name)
            assert value is not None
            tensors = _tensors(entry, value)
            for name in places:
                file.write(name, tensors[name])
    # In a narrower dtype transformers would round the scales, which are float32, to it.
    named = "torch_dtype" if "torch_dtype" in model.config else "dtype"
    quantization = _quantization(model)
    config = {**model.config, named: "float32", "quantization_config": quantization}
    text = json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"
    write_synced(folder / "config.json", text)
    sync_folder(folder)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (N, K) int8, from -2^(bits-1), into (N, ceil(K · bits / 32)) int32."""
    raised = (codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8).numpy()
    stream = np.unpackbits(raised[..., None], axis=-1, bitorder="little")[..., :bits]
    flat = stream.reshape(len(raised), -1)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    words = np.packbits(flat, axis=-1, bitorder="little").view("<i4")
    return torch.from_numpy(words.astype(np.int32))


def _passes(tensors: Mapping[str, WholeTensor]) -> Iterator[tuple[WholeTensor, dict[str, Slot]]]:
    """Order what is written: wider dtypes first, so that each tensor begins aligned."""
    for size in (8, 4, 2, 1):
        for entry in tensors.values():
            places = {n: slot for n, slot in _slots(entry).items() if slot.dtype.itemsize == size}
            if places:
                yield entry, places


def _slots(entry: WholeTensor) -> dict[str, Slot]:
    if entry.scheme is None:
        return {entry.name: Slot(shape=entry.shape, dtype=entry.dtype)}
    rows, features = entry.shape
    groups = features // entry.scheme.group_of(features)
    scales = Slot(shape=(rows, groups), dtype=entry.scheme.dtype)
    if not _is_packed(entry):
        return {
            f"{entry.module}.weight_scale": scales,
            entry.name: Slot(shape=entry.shape, dtype=torch.int8),
        }
    words = -(-features * entry.scheme.bits // 32)
    return {
        f"{entry.module}.weight_shape": Slot(shape=(2,), dtype=torch.int64),
        f"{entry.module}.weight_packed": Slot(shape=(rows, words), dtype=torch.int32),
        f"{entry.module}.weight_scale": scales,
    }


def _tensors(entry: WholeTensor, value: Quantised | Tensor) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {entry.name: value}
    assert entry.scheme is not None
    if not _is_packed(entry):
        return {f"{entry.module}.weight_scale": value.scales, entry.name: value.codes}
    return {
        f"{entry.module}.weight_shape": torch.tensor(entry.shape),
        f"{entry.module}.weight_packed": pack(value.codes, entry.scheme.bits),
        f"{entry.module}.weight_scale": value.scales,
    }


def _quantization(model: WholeModel) -> dict[str, Any]:
    """Return the `quantization_config` of config.json."""
    weights = [each for each in model.tensors.values() if each.name.endswith(".weight")]
    linear = [each for each in weights if each.kind == "linear"]
    scheme, first = next((e.scheme, e) for e in linear if e.scheme is not None)
    ignored = [entry.module for entry in linear if entry.scheme is None]
    if model.is_tied:
        ignored.append(HEAD)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if _is_packed(first) else "int-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ignored,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _arguments(scheme),
                "input_activations": _input_arguments(first.activations),
                "output_activations": None,
            }
        },
    }


def _is_packed(entry: WholeTensor) -> bool:
    """Whether codes are packed: unpacked ones transformers reads with rounded inputs alone."""
    assert entry.scheme is not None
    return entry.scheme.bits < 8 or entry.activations is None


def _arguments(scheme: Scheme) -> dict[str, Any]:
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if scheme.group is None else "group",
        "group_size": scheme.group,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }


def _input_arguments(activations: Activations | None) -> dict[str, Any] | None:
    if activations is None:
        return None
    return {
        "num_bits": activations.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "group_size": None,
        "dynamic": True,
        "actorder": None,
        "block_structure": None,
        "observer": None,
        "observer_kwargs": {},
    }
