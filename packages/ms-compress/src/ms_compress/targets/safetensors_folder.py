"""Folders with config.json and safetensors files, plain or compressed-tensors."""

from collections import Counter
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open

from ms_compress.errors import ExportError
from ms_compress.files.untrusted import check_file, decoding
from ms_compress.models.config_file import read_config, whole_or_none
from ms_compress.quantization.layers import K_SCALE, V_SCALE
from ms_compress.targets.libraries import library_errors
from ms_compress.targets.target import Contents

WEIGHT_FILES = ("*.safetensors",)
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NOT_WEIGHTS = (
    ".weight_scale",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_global_scale",
    ".input_scale",
    ".input_global_scale",
    f".{K_SCALE}",
    f".{V_SCALE}",
)
"""Tensors of compressed-tensors that describe weights, inputs or caches, and are not weights."""


def holds_safetensors(folder: Path) -> bool:
    """Return whether a folder has a config.json and weights."""
    with decoding(folder, error=ExportError):
        sizes = [path.stat().st_size for glob in WEIGHT_FILES for path in folder.glob(glob)]
    return (folder / "config.json").is_file() and any(sizes)


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Return the dtypes of a folder's float32, bfloat16 and float16 tensors, by name.

    Raises:
        ExportError: a file cannot be read.
    """
    dtypes: dict[str, torch.dtype] = {}
    for path in sorted(folder.glob("*.safetensors")):
        check_file(path, error=ExportError)
        with (
            library_errors(path, "the safetensors library"),
            safe_open(path, framework="pt") as file,
        ):
            for name in file.keys():  # noqa: SIM118 - not a dict
                dtype = file.get_slice(name).get_dtype()
                if dtype in FLOATS:
                    dtypes[name] = FLOATS[dtype]
    return dtypes


def contents(folder: Path) -> Contents:
    """Read the properties of a folder's model; packed weights count with their unpacked shape.

    Raises:
        ExportError: a file cannot be read.
    """
    weights_by_dtype: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        check_file(path, error=ExportError)
        with (
            library_errors(path, "the safetensors library"),
            safe_open(path, framework="pt") as file,
        ):
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name.endswith(NOT_WEIGHTS):
                    continue
                view = file.get_slice(name)
                shape = view.get_shape()
                if name.endswith(".weight_packed") and view.get_dtype() == "U8":
                    shape = [shape[0], 2 * shape[1]]  # two 4-bit floats per byte
                elif name.endswith(".weight_packed"):
                    # Packed codes have a shape in words; the weight's own shape is a tensor too.
                    shape = file.get_tensor(name.removesuffix("packed") + "shape").tolist()
                weights_by_dtype[str(view.get_dtype())] += prod(shape)
    dtype_names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    common_dtype = weights_by_dtype.most_common(1)[0][0] if weights_by_dtype else ""
    config = read_config(folder)
    return Contents(
        scheme=dtype_names.get(common_dtype, common_dtype),
        weights=sum(weights_by_dtype.values()),
        vocabulary=whole_or_none(config.get("vocab_size")),
        positions=whole_or_none(config.get("max_position_embeddings")),
    )
