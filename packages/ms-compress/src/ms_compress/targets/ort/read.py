"""Read the tensors and properties of ONNX files with the `onnx` library."""

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
"""Inputs of operators that are scales, zero points or rotary tables, by index."""


def reader(folder: Path, document: Mapping[str, Any]) -> Reader:
    """Return a reader of a folder's tensors that dequantizes codes."""
    onnx = library()
    path = folder / FILE
    with library_errors(path, LIBRARY):
        graph = onnx.load(path, load_external_data=False).graph
        _check_external(path, graph)
        constants = {constant.name: constant for constant in graph.initializer}

    def array(name: str) -> Tensor:
        constant = constants[name]
        with library_errors(path, LIBRARY):
            copy = onnx.TensorProto()
            copy.CopyFrom(constant)  # otherwise the graph would keep the data in memory
            return torch.from_numpy(onnx.numpy_helper.to_array(copy, str(folder)).copy())

    def read(name: str) -> Tensor:
        module = name.removesuffix(".weight")
        stored = next(
            (key for key in (f"{module}.codes", f"{module}.rows") if key in constants), name
        )
        if f"{module}.transposed" in constants:
            return array(f"{module}.transposed").t()
        value = array(stored)
        if value.dtype != torch.uint8:
            return value
        codes = torch.stack((value & 15, value >> 4), dim=-1).float() - 8  # low half first
        scales = array(f"{module}.scales")
        with library_errors(path, LIBRARY):  # the shapes may be inconsistent
            return (codes.view(*scales.shape, -1) * scales[..., None]).flatten(1)

    return read


def contents(folder: Path) -> Contents:
    """Read the properties of a folder's model.

    Raises:
        ExportError: the file cannot be read, or its data are truncated.
    """
    onnx, path = library(), folder / FILE
    with library_errors(path, LIBRARY):
        graph = onnx.load(path, load_external_data=False).graph
        node = next((node for node in graph.node if node.op_type == "MatMulNBits"), None)
        attributes = {} if node is None else {item.name: item.i for item in node.attribute}
        logits = next((output for output in graph.output if output.name == "logits"), None)
        sizes = [] if logits is None else logits.type.tensor_type.shape.dim
        _check_external(path, graph)
        return Contents(
            scheme=f"{attributes['bits']}-bit g{attributes['block_size']}"
            if attributes
            else "float32",
            weights=_count_weights(onnx, graph, attributes.get("bits", 8)),
            vocabulary=(sizes[-1].dim_value or None) if sizes else None,
            positions=_positions(graph),
        )


def _check_external(path: Path, graph: Any) -> None:
    """Check that constants are inside the folder and not beyond the end of their file."""
    for constant in graph.initializer:
        external = {entry.key: entry.value for entry in constant.external_data}
        if not external:
            continue
        data = path.parent / external["location"]
        # An untrusted model must not make us read files outside its folder.
        if "/" in external["location"] or not data.is_file():
            raise ExportError(
                f"{path}: {constant.name} is stored in {external['location']!r}, which is not a"
                " file in the same folder; export it again"
            )
        end = int(external.get("offset", 0)) + int(external.get("length", 0))
        if end > data.stat().st_size:
            raise ExportError(
                f"{data} is truncated: {constant.name} ends at byte {end} of {data.stat().st_size};"
                " export it again"
            )


def _count_weights(onnx: Any, graph: Any, bits: int) -> int:
    types = onnx.TensorProto
    weights_per_element = {types.FLOAT: 1, types.FLOAT16: 1, types.UINT8: 8 // bits}
    not_weights = {
        name
        for node in graph.node
        for index, name in enumerate(node.input)
        if index in NOT_WEIGHTS.get(node.op_type, ())
    }
    return sum(
        prod(constant.dims) * weights_per_element.get(constant.data_type, 0)
        for constant in graph.initializer
        if constant.name not in not_weights and prod(constant.dims) > 1  # scalars are not weights
    )


def _positions(graph: Any) -> int | None:
    """Return the number of rows of the rotary table, or None."""
    tables = {
        node.input[7]
        for node in graph.node
        if node.op_type == "GroupQueryAttention" and len(node.input) > 7
    }
    return next(
        (constant.dims[0] for constant in graph.initializer if constant.name in tables), None
    )
