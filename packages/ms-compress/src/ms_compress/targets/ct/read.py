"""Reading folders of compressed-tensors by its own library: tensors, and what the folder says."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from safetensors import safe_open
from torch import Tensor

from ms_compress.errors import ExportError
from ms_compress.files.untrusted import check_file
from ms_compress.models.config_file import quantization
from ms_compress.targets import safetensors_folder
from ms_compress.targets.ct import llama4_experts
from ms_compress.targets.ct.write import FILE
from ms_compress.targets.libraries import library_errors
from ms_compress.targets.target import Contents, Reader

LIBRARY = "the compressed-tensors library"


def reader(folder: Path, document: Mapping[str, Any]) -> Reader:
    """Return what reads the tensors of a folder."""
    from compressed_tensors.compressors import unpack_from_int32
    from compressed_tensors.quantization import QuantizationConfig, dequantize

    with library_errors(folder / "config.json", LIBRARY):
        said = QuantizationConfig.model_validate(quantization(folder))
        (group,) = said.config_groups.values()

    def read(name: str) -> Tensor:
        module = name.removesuffix(".weight")
        check_file(folder / FILE, error=ExportError)
        with _errors(folder / FILE), safe_open(folder / FILE, framework="pt") as file:
            names = set(file.keys())
            if llama4_experts.is_fused(name, document):
                stored = llama4_experts.stored_names(name, document["num_local_experts"])
                return llama4_experts.join(name, [_get(file, each) for each in stored]).float()
            if f"{module}.weight_scale" not in names:
                return _get(file, name).float()
            if f"{module}.weight_packed" in names:
                packed = _get(file, f"{module}.weight_packed")
                shape = torch.Size(_get(file, f"{module}.weight_shape").tolist())
                codes = unpack_from_int32(packed, group.weights.num_bits, shape)
            else:
                codes = _get(file, name)
            scales = _get(file, f"{module}.weight_scale")
            out: Tensor = dequantize(codes, scales, args=group.weights, dtype=torch.float32)
        return out

    return read


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Turn errors of the libraries into one line, but let a missing tensor be a KeyError."""
    missing = None
    with library_errors(path, LIBRARY):
        try:
            yield
        except KeyError as error:
            missing = error
    if missing is not None:
        raise missing


def _get(file: Any, name: str) -> Tensor:
    if name not in file.keys():  # noqa: SIM118 - the file is no dict
        raise KeyError(name)
    tensor: Tensor = file.get_tensor(name)
    return tensor


def contents(folder: Path) -> Contents:
    """Read what a folder says of its model, by the first group of its quantization_config.

    Raises:
        ExportError: a file cannot be read, or the group does not say how weights are held.
    """
    said = quantization(folder) or {}
    try:
        weights = next(iter(said["config_groups"].values()))["weights"]
        bits, group = weights["num_bits"], weights["group_size"]
    except (AttributeError, KeyError, StopIteration, TypeError) as error:
        raise ExportError(
            f"{folder}/config.json: its quantization_config does not say the weights' num_bits and"
            " group_size; export it again"
        ) from error
    scheme = f"{bits}-bit {f'g{group}' if group else 'rows'}"
    return evolve(safetensors_folder.contents(folder), scheme=scheme)
