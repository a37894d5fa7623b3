"""What an exported folder is: whose runtime reads it, its bytes on disk, its number of weights."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from attrs import frozen
from safetensors import safe_open

from ms_compress.errors import ExportError
from ms_compress.files.untrusted import decoding
from ms_compress.models.config_file import quantization, read_config
from ms_compress.targets.gguf import write as gguf
from ms_compress.targets.ort import write as onnx

__all__ = ["Footprint", "footprint"]

WEIGHT_FILES = ("*.safetensors", "*.gguf", "*.onnx", "*.onnx.data")
SHOWN_CHARACTERS = 200
BESIDE = (".weight_scale", ".weight_shape")
"""Tensors of compressed-tensors that say how a weight is held, and are none."""
ONNX_BESIDE = {"MatMulNBits": (2, 3), "GatherBlockQuantized": (2, 3), "GroupQueryAttention": (7, 8)}
"""Inputs that are scales, zero points and rotary tables."""


@frozen(kw_only=True)
class Footprint:
    """What is known of a folder without running it."""

    folder: Path
    target: str
    """`float`, `ct`, `ort` or `gguf`, as `open_runtime` takes it."""
    scheme: str
    """How most weights are held, such as `4-bit g32`, in the file's own words."""
    size_bytes: int
    """Of the files that hold weights."""
    weights: int
    """Numbers of the model, tied ones counted once."""
    vocabulary: int | None
    """None where the folder does not say."""
    positions: int | None
    """The longest text; None where the folder does not say."""

    @property
    def bits_a_weight(self) -> float:
        """All bytes, in bits, over the number of weights."""
        return 8 * self.size_bytes / self.weights


@frozen(kw_only=True)
class _Found:
    scheme: str
    weights: int
    vocabulary: int | None
    positions: int | None


def footprint(folder: str | Path) -> Footprint:
    """Look at a folder's files.

    Raises:
        ExportError: it is no exported model, or a file of it cannot be read.
    """
    folder = Path(folder)
    with decoding(folder, error=ExportError):
        size = sum(path.stat().st_size for each in WEIGHT_FILES for path in folder.glob(each))
    if (folder / gguf.FILE).is_file():
        target, found = "gguf", _gguf(folder / gguf.FILE)
    elif (folder / onnx.FILE).is_file():
        target, found = "ort", _onnx(folder / onnx.FILE)
    elif (folder / "config.json").is_file() and size:
        target = "float" if quantization(folder) is None else "ct"
        found = _safetensors(folder)
    else:
        raise ExportError(
            f"{folder}: no model is in it; give a folder with model.gguf, model.onnx, or config"
            ".json and safetensors"
        )
    if not found.weights:
        raise ExportError(f"{folder}: its files hold no weights; export it again")
    return Footprint(
        folder=folder,
        target=target,
        scheme=found.scheme,
        size_bytes=size,
        weights=found.weights,
        vocabulary=found.vocabulary,
        positions=found.positions,
    )


def _safetensors(folder: Path) -> _Found:
    """Packed weights count by the shape that is said of them."""
    kinds: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        with _read(path, "safetensors"), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no dict
                if name.endswith(BESIDE):
                    continue
                view = file.get_slice(name)
                shape = view.get_shape()
                if name.endswith(".weight_packed"):
                    said = name.removesuffix("packed") + "shape"
                    shape = file.get_tensor(said).tolist()
                kinds[str(view.get_dtype())] += prod(shape)
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    most = kinds.most_common(1)[0][0] if kinds else ""
    config, how = read_config(folder), quantization(folder)
    return _Found(
        scheme=names.get(most, most) if how is None else _packed(folder, how),
        weights=sum(kinds.values()),
        vocabulary=_whole(config.get("vocab_size")),
        positions=_whole(config.get("max_position_embeddings")),
    )


@contextmanager
def _read(path: Path, library: str) -> Iterator[None]:
    """Turn whatever a format's library makes of a damaged file into one line.

    Raises:
        ExportError: it cannot be read.
    """
    try:
        yield
    except ExportError:
        raise
    except Exception as error:  # of a damaged file the libraries raise whatever they stumble over
        words = " ".join(str(error).split())[:SHOWN_CHARACTERS] or type(error).__name__
        raise ExportError(
            f"{path}: the {library} library cannot read it: {words}; export it again"
        ) from error


def _packed(folder: Path, how: dict[str, Any]) -> str:
    """The first group's words, of compressed-tensors."""
    try:
        weights = next(iter(how["config_groups"].values()))["weights"]
        bits, group = weights["num_bits"], weights["group_size"]
    except (AttributeError, KeyError, StopIteration, TypeError) as error:
        raise ExportError(
            f"{folder}/config.json: its quantization_config does not say the weights' num_bits and"
            " group_size; export it again"
        ) from error
    return f"{bits}-bit {f'g{group}' if group else 'rows'}"


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _gguf(path: Path) -> _Found:
    library = gguf.library()
    with _read(path, "gguf"):
        file = library.GGUFReader(path)
        kinds: Counter[str] = Counter()
        for tensor in file.tensors:
            if tensor.name != "rope_freqs.weight":
                kinds[tensor.tensor_type.name] += int(tensor.n_elements)
        rows = (int(each.shape[-1]) for each in file.tensors if each.name == "token_embd.weight")
        return _Found(
            scheme=kinds.most_common(1)[0][0] if kinds else "",
            weights=sum(kinds.values()),
            vocabulary=next(rows, None),
            positions=_whole(_said(file, f"{_said(file, 'general.architecture')}.context_length")),
        )


def _said(file: Any, name: str) -> Any:
    field = file.fields.get(name)
    return None if field is None else field.contents()


def _onnx(path: Path) -> _Found:
    library = onnx.library()
    with _read(path, "onnx"):
        graph = library.load(path, load_external_data=False).graph
        node = next((each for each in graph.node if each.op_type == "MatMulNBits"), None)
        said = {} if node is None else {each.name: each.i for each in node.attribute}
        logits = next((each for each in graph.output if each.name == "logits"), None)
        sizes = [] if logits is None else logits.type.tensor_type.shape.dim
        _check_external(path, graph)
        return _Found(
            scheme=f"{said['bits']}-bit g{said['block_size']}" if said else "float32",
            weights=_onnx_weights(library, graph, said.get("bits", 8)),
            vocabulary=(sizes[-1].dim_value or None) if sizes else None,
            positions=_onnx_positions(graph),
        )


def _check_external(path: Path, graph: Any) -> None:
    """Refuse constants that lie outside of the folder, or beyond the end of their file.

    Raises:
        ExportError: names the constant.
    """
    for constant in graph.initializer:
        said = {each.key: each.value for each in constant.external_data}
        if not said:
            continue
        data = path.parent / said["location"]
        if "/" in said["location"] or not data.is_file():
            raise ExportError(
                f"{path}: {constant.name} lies in {said['location']!r}, which is none"
            )
        end = int(said.get("offset", 0)) + int(said.get("length", 0))
        if end > data.stat().st_size:
            raise ExportError(
                f"{data}: {constant.name} ends at byte {end} of {data.stat().st_size}; it is cut"
                " off, export it again"
            )


def _onnx_weights(library: Any, graph: Any, bits: int) -> int:
    kinds = library.TensorProto
    numbers = {kinds.FLOAT: 1, kinds.FLOAT16: 1, kinds.UINT8: 8 // bits}
    beside = {
        name
        for node in graph.node
        for place, name in enumerate(node.input)
        if place in ONNX_BESIDE.get(node.op_type, ())
    }
    return sum(
        prod(each.dims) * numbers.get(each.data_type, 0)
        for each in graph.initializer
        if each.name not in beside and prod(each.dims) > 1  # one number alone is no weight
    )


def _onnx_positions(graph: Any) -> int | None:
    """The rows of the rotary table."""
    tables = {
        node.input[7]
        for node in graph.node
        if node.op_type == "GroupQueryAttention" and len(node.input) > 7
    }
    return next((each.dims[0] for each in graph.initializer if each.name in tables), None)
