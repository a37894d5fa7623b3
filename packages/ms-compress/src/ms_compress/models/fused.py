"""Tensors in a folder that contain several of a model's matrices, stacked by rows.

Codes and scales of a row depend on that row only, so stacking separately quantized matrices gives
the quantized fused matrix.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from ms_compress.errors import ExportError
from ms_compress.models.shards import WholeTensor
from ms_compress.quantization.rounding import QuantizedWeight

Fused = Mapping[str, tuple[str, ...]]
"""The model's tensors for each tensor in the folder, first rows first."""


def fused_names(config: Any, separate: Collection[str] = ()) -> Fused:
    """Return the tensors that are separate in an ms_parallel model but fused in its folder.

    Args:
        config: configuration of the model.
        separate: names of modules that were replaced by separate experts.

    Raises:
        ExportError: a tensor is another one's slice but not a block of rows; names the first.
    """
    from ms_parallel.models.registry import weight_slices

    rows_by_tensor: dict[str, list[tuple[int, str]]] = {}
    for name, pieces in weight_slices(config).items():
        if name.rsplit(".", 2)[0] in separate:
            continue
        # Stored under its own name: nothing to fuse.
        if [piece.tensor for piece in pieces] == [name]:
            continue
        piece = pieces[0]
        first, columns = piece.part[0], piece.part[1:]
        all_columns = tuple(slice(0, size) for size in piece.shape[1:])
        in_order = piece.dims == tuple(range(len(piece.shape)))
        # Only blocks of complete rows can be joined by stacking their codes and scales.
        if len(pieces) > 1 or first.step or columns != all_columns or not in_order:
            raise ExportError(
                f"cannot export {config.model_type!r}: {name!r} is a slice of {piece.tensor!r},"
                " which is not a block of rows; save the model, load it with transformers,"
                " and export that"
            )
        rows_by_tensor.setdefault(piece.tensor, []).append((first.start, name))
    return {
        tensor: tuple(name for _, name in sorted(rows)) for tensor, rows in rows_by_tensor.items()
    }


def fuse(tensors: Mapping[str, WholeTensor], fused: Fused) -> dict[str, WholeTensor]:
    """Replace the parts of each fused tensor by the fused tensor.

    Raises:
        ExportError: the parts of a fused tensor are not all quantized in the same way.
    """
    owners = {part: name for name, parts in fused.items() for part in parts}
    merged: dict[str, WholeTensor] = {}
    for name, entry in tensors.items():
        fused_name = owners.get(name, name)
        if fused_name == name:
            merged[name] = entry
        elif fused_name not in merged:
            merged[fused_name] = _stack_entries(
                fused_name, [tensors[part] for part in fused[fused_name]]
            )
    return merged


def _stack_entries(name: str, parts: Sequence[WholeTensor]) -> WholeTensor:
    first = parts[0]
    for part in parts:
        if (part.scheme, part.activations) != (first.scheme, first.activations):
            raise ExportError(
                f"{first.module} and {part.module} are one tensor, {name}, in the folder, but are"
                " not quantized alike; name both in `ignore`, or neither"
            )
    if len(parts) > 1 and first.scheme is not None and first.scheme.spans_rows:
        raise ExportError(
            f"{first.module} is a part of {name} in the folder, and {first.scheme} needs common"
            " scales for all parts of a tensor; use a scheme with scales per row or group, such as"
            " ct.fp8_dynamic or ct.mxfp8"
        )
    rows = sum(part.shape[0] for part in parts)
    shards = tuple(shard for part in parts for shard in part.shards)
    return evolve(first, name=name, shape=(rows, *first.shape[1:]), shards=shards)


def stack_rows(values: Sequence[QuantizedWeight | Tensor]) -> QuantizedWeight | Tensor:
    """Concatenate matrices, or their codes and scales, by rows."""
    plain = [value for value in values if isinstance(value, Tensor)]
    if plain:
        return torch.cat(plain)
    quantized = [value for value in values if isinstance(value, QuantizedWeight)]
    parts = [value.row_parts for value in quantized]
    stacked: dict[str, Any] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return evolve(quantized[0], **stacked)
