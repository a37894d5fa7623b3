"""Folders with a config.json and safetensors files, plain or of compressed-tensors."""

from collections import Counter
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open

from ms_compress.errors import ExportError
from ms_compress.files.untrusted import check_file, decoding
from ms_compress.models.config_file import read_config, whole_or_none
from ms_compress.targets.libraries import library_errors
from ms_compress.targets.target import Contents

WEIGHT_FILES = ("*.safetensors",)
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NOT_WEIGHTS = (".weight_scale", ".weight_shape")
"""Tensors of compressed-tensors that say how a weight is held, and are none."""


def holds_safetensors(folder: Path) -> bool:
    """Return whether a folder has a config.json and weights beside it."""
    with decoding(folder, error=ExportError):
        sizes = [path.stat().st_size for each in WEIGHT_FILES for path in folder.glob(each)]
    return (folder / "config.json").is_file() and any(sizes)


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Read the dtypes of a folder's float32, bfloat16 and float16 tensors, by name.

    Raises:
        ExportError: a file cannot be read.
    """
    found: dict[str, torch.dtype] = {}
    for path in sorted(folder.glob("*.safetensors")):
        check_file(path, error=ExportError)
        with (
            library_errors(path, "the safetensors library"),
            safe_open(path, framework="pt") as file,
        ):
            for name in file.keys():  # noqa: SIM118 - the file is no dict
                dtype = file.get_slice(name).get_dtype()
                if dtype in FLOATS:
                    found[name] = FLOATS[dtype]
    return found


def contents(folder: Path) -> Contents:
    """Read what a folder's files say of its model; packed weights count by the shape said of them.

    Raises:
        ExportError: a file cannot be read.
    """
    kinds: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        check_file(path, error=ExportError)
        with (
            library_errors(path, "the safetensors library"),
            safe_open(path, framework="pt") as file,
        ):
            for name in file.keys():  # noqa: SIM118 - the file is no dict
                if name.endswith(NOT_WEIGHTS):
                    continue
                view = file.get_slice(name)
                shape = view.get_shape()
                if name.endswith(".weight_packed"):
                    shape = file.get_tensor(name.removesuffix("packed") + "shape").tolist()
                kinds[str(view.get_dtype())] += prod(shape)
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    most = kinds.most_common(1)[0][0] if kinds else ""
    config = read_config(folder)
    return Contents(
        scheme=names.get(most, most),
        weights=sum(kinds.values()),
        vocabulary=whole_or_none(config.get("vocab_size")),
        positions=whole_or_none(config.get("max_position_embeddings")),
    )
