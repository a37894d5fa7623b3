"""Read the tensors and properties of compressed-tensors folders with their own library."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    """Return a reader of a folder's tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    with library_errors(folder / "config.json", LIBRARY):
        config = QuantizationConfig.model_validate(quantization(folder))
        (group,) = config.config_groups.values()
        compressor = BaseCompressor.get_value_from_registry(config.format)

    def read(name: str) -> Tensor:
        module = name.removesuffix(".weight")
        check_file(folder / FILE, error=ExportError)
        with _errors(folder / FILE), safe_open(folder / FILE, framework="pt") as file:
            names = set(file.keys())
            if llama4_experts.is_fused(name, document):
                expert_names = llama4_experts.stored_names(name, document["num_local_experts"])
                return llama4_experts.join(name, [_get(file, key) for key in expert_names]).float()
            # Not quantized: stored as in a plain folder.
            if f"{module}.weight_scale" not in names:
                return _get(file, name).float()
            stored = {
                key.removeprefix(f"{module}."): _get(file, key)
                for key in names
                if key.startswith(f"{module}.weight")
            }
            out: Tensor = compressor.decompress(stored, group)["weight"]
        return out.float()

    return read


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Convert errors of the libraries to one line, but let a missing tensor raise KeyError."""
    key_error = None
    with library_errors(path, LIBRARY):
        try:
            yield
        except KeyError as error:
            key_error = error
    if key_error is not None:
        raise key_error


def _get(file: Any, name: str) -> Tensor:
    if name not in file.keys():  # noqa: SIM118 - not a dict
        raise KeyError(name)
    tensor: Tensor = file.get_tensor(name)
    return tensor


def contents(folder: Path) -> Contents:
    """Read the properties of a folder's model; the scheme is taken from the first config group.

    Raises:
        ExportError: a file cannot be read, or the group lacks num_bits or group_size.
    """
    settings = quantization(folder) or {}
    try:
        weights = next(iter(settings["config_groups"].values()))["weights"]
        bits, group = weights["num_bits"], weights["group_size"]
    except (AttributeError, KeyError, StopIteration, TypeError) as error:
        raise ExportError(
            f"{folder}/config.json: its quantization_config lacks the weights' num_bits or"
            " group_size; export it again"
        ) from error
    prefix = "fp" if weights.get("type") == "float" else ""
    strategy = {"tensor": "tensor", "block": "blocks"}.get(str(weights.get("strategy")), "rows")
    scheme = f"{prefix}{bits}-bit {f'g{group}' if group else strategy}"
    return evolve(safetensors_folder.contents(folder), scheme=scheme)
