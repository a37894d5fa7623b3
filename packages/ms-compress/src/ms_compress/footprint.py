"""What an exported folder is: whose runtime reads it, its bytes on disk, its number of weights."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from attrs import frozen
from safetensors import SafetensorError, safe_open

from ms_compress.decoder_config import decoder_config
from ms_compress.errors import ExportError
from ms_compress.export import gguf, onnx

__all__ = ["Footprint", "footprint"]

WEIGHT_FILES = ("*.safetensors", "*.gguf", "*.onnx", "*.onnx.data")
BESIDE = (".weight_scale", ".weight_shape")
"""Tensors of compressed-tensors that say how a weight is held, and are none."""


@frozen(kw_only=True)
class Footprint:
    """What is known of a folder without running it."""

    target: str
    """`float`, `ct`, `ort` or `gguf`, as `open_runtime` takes it."""
    scheme: str
    """How most weights are held, such as `4-bit g32`, in the file's own words."""
    size_bytes: int
    """Of the files that hold weights."""
    weights: int
    """Numbers of the model, tied ones counted once."""

    @property
    def bits_a_weight(self) -> float:
        """All bytes, in bits, over the number of weights."""
        return 8 * self.size_bytes / self.weights


def footprint(folder: str | Path) -> Footprint:
    """Look at a folder's files.

    Raises:
        ExportError: it is no exported model, or a file of it cannot be read.
    """
    folder = Path(folder)
    size = sum(path.stat().st_size for each in WEIGHT_FILES for path in folder.glob(each))
    if (folder / gguf.FILE).is_file():
        target, (scheme, weights) = "gguf", _gguf(folder / gguf.FILE)
    elif (folder / onnx.FILE).is_file():
        target, (scheme, weights) = "ort", _onnx(folder)
    elif (folder / "config.json").is_file() and size:
        quantization = _config(folder).get("quantization_config")
        target = "float" if quantization is None else "ct"
        dtype, weights = _safetensors(folder)
        scheme = dtype if quantization is None else _packed(quantization)
    else:
        raise ExportError(
            f"{folder}: no model is in it; give a folder with model.gguf, model.onnx, or config"
            ".json and safetensors"
        )
    if not weights:
        raise ExportError(f"{folder}: its files hold no weights; export it again")
    return Footprint(target=target, scheme=scheme, size_bytes=size, weights=weights)


def _config(folder: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{folder}/config.json: cannot be read: {error}") from error
    return document


def _packed(quantization: dict[str, Any]) -> str:
    """The first group's words, of compressed-tensors."""
    for group in quantization.get("config_groups", {}).values():
        weights = group.get("weights") or {}
        size = weights.get("group_size")
        return f"{weights.get('num_bits')}-bit {f'g{size}' if size else 'rows'}"
    return str(quantization.get("quant_method", "quantised"))


def _safetensors(folder: Path) -> tuple[str, int]:
    """The dtype of most numbers, and how many there are; packed ones by the shape they say."""
    kinds: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - the file is no dict
                    if name.endswith(BESIDE):
                        continue
                    view = file.get_slice(name)
                    shape = view.get_shape()
                    if name.endswith(".weight_packed"):
                        said = name.removesuffix("packed") + "shape"
                        shape = file.get_tensor(said).tolist()
                    count = 1
                    for size in shape:
                        count *= size
                    kinds[str(view.get_dtype())] += count
        except (OSError, SafetensorError) as error:
            raise ExportError(f"{path}: cannot be read: {error}") from error
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    most = kinds.most_common(1)[0][0] if kinds else ""
    return names.get(most, most), sum(kinds.values())


def _gguf(path: Path) -> tuple[str, int]:
    try:
        tensors = gguf.library().GGUFReader(path).tensors
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ExportError(f"{path}: the gguf library cannot read it: {error}") from error
    kinds: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.name != "rope_freqs.weight":
            kinds[tensor.tensor_type.name] += int(tensor.n_elements)
    return (kinds.most_common(1)[0][0] if kinds else ""), sum(kinds.values())


def _onnx(folder: Path) -> tuple[str, int]:
    config = decoder_config(_config(folder), "ONNX")
    library = onnx.library()
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

    try:
        graph = library.load(folder / onnx.FILE, load_external_data=False).graph
    except (OSError, DecodeError) as error:
        raise ExportError(
            f"{folder / onnx.FILE}: the onnx library cannot read it: {error}"
        ) from error
    node = next((each for each in graph.node if each.op_type == "MatMulNBits"), None)
    scheme = "float32"
    if node is not None:
        said = {each.name: each.i for each in node.attribute}
        scheme = f"{said['bits']}-bit g{said['block_size']}"
    queries, keys = (n * config.head_width for n in (config.heads, config.key_heads))
    block = config.hidden * (2 * queries + 2 * keys + 3 * config.inner + 2)
    ends = config.vocabulary * config.hidden * (1 if config.tied else 2) + config.hidden
    return scheme, ends + config.layers * block
