"""An exported folder's tensors as float32, one at a time, as its format's own library reads them.

Names, codes and the order of rows are undone by other means than the writers', so that no mistake
is made on both sides. A reader takes the name of a Hugging Face tensor; what is not in the folder
is a KeyError.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ms_compress.models.config_file import quantization
from ms_compress.models.decoder_config import decoder_config
from ms_compress.targets.ct import write as compressed_tensors
from ms_compress.targets.gguf import write as gguf
from ms_compress.targets.ort import write as onnx

__all__ = ["Reader", "reader"]

Reader = Callable[[str], Tensor]


def reader(folder: Path, target: str, document: Mapping[str, Any]) -> Reader:
    """What reads a folder of a target; `document` is the config.json of the model in it."""
    if target == "gguf":
        return _gguf(folder, document)
    return _compressed(folder) if target == "ct" else _onnx(folder)


def _compressed(folder: Path) -> Reader:
    from compressed_tensors.compressors import unpack_from_int32
    from compressed_tensors.quantization import QuantizationConfig, dequantize

    said = QuantizationConfig.model_validate(quantization(folder))
    (group,) = said.config_groups.values()
    path = folder / compressed_tensors.FILE

    def read(name: str) -> Tensor:
        module = name.removesuffix(".weight")
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if f"{module}.weight_scale" not in names:
                return _of(file, name).float()
            if f"{module}.weight_packed" in names:
                packed = _of(file, f"{module}.weight_packed")
                shape = torch.Size(_of(file, f"{module}.weight_shape").tolist())
                codes = unpack_from_int32(packed, group.weights.num_bits, shape)
            else:
                codes = _of(file, name)
            scales = _of(file, f"{module}.weight_scale")
        out: Tensor = dequantize(codes, scales, args=group.weights, dtype=torch.float32)
        return out

    return read


def _of(file: Any, name: str) -> Tensor:
    if name not in file.keys():  # noqa: SIM118 - the file is no dict
        raise KeyError(name)
    tensor: Tensor = file.get_tensor(name)
    return tensor


def _gguf(folder: Path, document: Mapping[str, Any]) -> Reader:
    library = gguf.library()
    config = decoder_config(document, "GGUF")
    file = library.GGUFReader(folder / gguf.FILE)
    found = {tensor.name: tensor for tensor in file.tensors}
    said = file.fields["general.architecture"].contents()
    architecture = next(each for each, name in library.MODEL_ARCH_NAMES.items() if name == said)
    names = library.get_tensor_name_map(architecture, config.layers)
    rotated = {"q_proj": config.heads, "k_proj": config.key_heads} if said == "llama" else {}

    def read(name: str) -> Tensor:
        tensor = found[names.get_name(name, (".weight", ".bias"))]
        rows = torch.from_numpy(library.dequantize(tensor.data, tensor.tensor_type).copy())
        heads = rotated.get(name.split(".")[-2])
        return rows if heads is None else rows[_halves(len(rows), heads)]

    return read


def _halves(rows: int, heads: int) -> Tensor:
    """Where llama.cpp has the rows of heads that are rotated by halves: 0, 2, ..., 1, 3, ..."""
    width = rows // heads
    row = torch.arange(rows)
    place = row % width
    return row - place + 2 * (place % (width // 2)) + place // (width // 2)


def _onnx(folder: Path) -> Reader:
    library = onnx.library()
    graph = library.load(folder / onnx.FILE, load_external_data=False).graph
    found = {constant.name: constant for constant in graph.initializer}

    def array(name: str) -> Tensor:
        alone = library.TensorProto()
        alone.CopyFrom(found[name])  # or the graph would keep what is read
        return torch.from_numpy(library.numpy_helper.to_array(alone, str(folder)).copy())

    def read(name: str) -> Tensor:
        module = name.removesuffix(".weight")
        stored = next(
            (each for each in (f"{module}.codes", f"{module}.rows") if each in found), name
        )
        if f"{module}.transposed" in found:
            return array(f"{module}.transposed").t()
        value = array(stored)
        if value.dtype != torch.uint8:
            return value
        codes = torch.stack((value & 15, value >> 4), dim=-1).float() - 8
        scales = array(f"{module}.scales")
        return (codes.view(*scales.shape, -1) * scales[..., None]).flatten(1)

    return read
