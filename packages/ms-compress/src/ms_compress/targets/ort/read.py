"""Reading ONNX files by the `onnx` library: their tensors, and what the graph says of itself."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ms_compress.errors import ExportError
from ms_compress.targets.libraries import library_errors
from ms_compress.targets.ort.write import FILE, library
from ms_compress.targets.target import Contents, Reader

LIBRARY = "the onnx library"
NOT_WEIGHTS = {"MatMulNBits": (2, 3), "GatherBlockQuantized": (2, 3), "GroupQueryAttention": (7, 8)}
"""Inputs that are scales, zero points and rotary tables."""


def reader(folder: Path, document: Mapping[str, Any]) -> Reader:
    """Return what reads the tensors of a folder; codes are unpacked and scaled."""
    onnx = library()
    path = folder / FILE
    with library_errors(path, LIBRARY):
        graph = onnx.load(path, load_external_data=False).graph
        _check_external(path, graph)
        found = {constant.name: constant for constant in graph.initializer}

    def array(name: str) -> Tensor:
        constant = found[name]
        with library_errors(path, LIBRARY):
            alone = onnx.TensorProto()
            alone.CopyFrom(constant)  # or the graph would keep what is read
            return torch.from_numpy(onnx.numpy_helper.to_array(alone, str(folder)).copy())

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
        with library_errors(path, LIBRARY):  # of shapes that do not fit together
            return (codes.view(*scales.shape, -1) * scales[..., None]).flatten(1)

    return read


def contents(folder: Path) -> Contents:
    """Read what a folder's graph says of its model.

    Raises:
        ExportError: the file cannot be read, or its data are cut off.
    """
    onnx, path = library(), folder / FILE
    with library_errors(path, LIBRARY):
        graph = onnx.load(path, load_external_data=False).graph
        node = next((each for each in graph.node if each.op_type == "MatMulNBits"), None)
        said = {} if node is None else {each.name: each.i for each in node.attribute}
        logits = next((each for each in graph.output if each.name == "logits"), None)
        sizes = [] if logits is None else logits.type.tensor_type.shape.dim
        _check_external(path, graph)
        return Contents(
            scheme=f"{said['bits']}-bit g{said['block_size']}" if said else "float32",
            weights=_count_weights(onnx, graph, said.get("bits", 8)),
            vocabulary=(sizes[-1].dim_value or None) if sizes else None,
            positions=_positions(graph),
        )


def _check_external(path: Path, graph: Any) -> None:
    """Refuse constants that lie outside of the folder, or beyond the end of their file."""
    for constant in graph.initializer:
        said = {each.key: each.value for each in constant.external_data}
        if not said:
            continue
        data = path.parent / said["location"]
        if "/" in said["location"] or not data.is_file():
            raise ExportError(
                f"{path}: {constant.name} lies in {said['location']!r}, which is no file beside"
                " it; export it again"
            )
        end = int(said.get("offset", 0)) + int(said.get("length", 0))
        if end > data.stat().st_size:
            raise ExportError(
                f"{data}: {constant.name} ends at byte {end} of {data.stat().st_size}; it is cut"
                " off, export it again"
            )


def _count_weights(onnx: Any, graph: Any, bits: int) -> int:
    kinds = onnx.TensorProto
    numbers = {kinds.FLOAT: 1, kinds.FLOAT16: 1, kinds.UINT8: 8 // bits}
    not_weights = {
        name
        for node in graph.node
        for place, name in enumerate(node.input)
        if place in NOT_WEIGHTS.get(node.op_type, ())
    }
    return sum(
        prod(each.dims) * numbers.get(each.data_type, 0)
        for each in graph.initializer
        if each.name not in not_weights and prod(each.dims) > 1  # one number alone is no weight
    )


def _positions(graph: Any) -> int | None:
    """Return the number of rows of the rotary table."""
    tables = {
        node.input[7]
        for node in graph.node
        if node.op_type == "GroupQueryAttention" and len(node.input) > 7
    }
    return next((each.dims[0] for each in graph.initializer if each.name in tables), None)
