"""Tensors of a folder that hold several of a model's matrices, one below the other.

A row's codes and scales depend on that row alone, so that matrices that were rounded apart are,
one below the other, the fused matrix rounded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from ms_compress.errors import ExportError
from ms_compress.models.shards import WholeTensor
from ms_compress.quantisation.rounding import QuantizedWeight

Fused = Mapping[str, tuple[str, ...]]
"""By name of a folder's tensor the model's, the first rows first."""


def fused_names(config: Any) -> Fused:
    """Find the tensors that the folder of an ms_parallel model holds and the model has in parts.

    Raises:
        ExportError: it holds a tensor otherwise than as rows of another; names the first.
    """
    from ms_parallel.models.registry import weight_slices

    found: dict[str, list[tuple[int, str]]] = {}
    for name, pieces in weight_slices(config).items():
        if [piece.tensor for piece in pieces] == [name]:
            continue
        piece = pieces[0]
        first, columns = piece.part[0], piece.part[1:]
        whole = tuple(slice(0, size) for size in piece.shape[1:])
        in_order = piece.dims == tuple(range(len(piece.shape)))
        if len(pieces) > 1 or first.step or columns != whole or not in_order:
            raise ExportError(
                f"cannot export {config.model_type!r}: {name!r} is a slice of {piece.tensor!r},"
                " which is not a block of rows; save the model, and export the one that"
                " transformers loads from that folder"
            )
        found.setdefault(piece.tensor, []).append((first.start, name))
    return {tensor: tuple(name for _, name in sorted(rows)) for tensor, rows in found.items()}


def fuse(tensors: Mapping[str, WholeTensor], fused: Fused) -> dict[str, WholeTensor]:
    """Put the fused tensors in the place of the first of their parts, and leave out the others.

    Raises:
        ExportError: some parts of a fused one are rounded, and some are not, or otherwise.
    """
    owners = {part: name for name, parts in fused.items() for part in parts}
    made: dict[str, WholeTensor] = {}
    for name, entry in tensors.items():
        whole = owners.get(name, name)
        if whole == name:
            made[name] = entry
        elif whole not in made:
            made[whole] = _below(whole, [tensors[part] for part in fused[whole]])
    return made


def _below(name: str, parts: Sequence[WholeTensor]) -> WholeTensor:
    first = parts[0]
    for part in parts:
        if (part.scheme, part.activations) != (first.scheme, first.activations):
            raise ExportError(
                f"{first.module} and {part.module} are one tensor, {name}, in the folder, and are"
                " not rounded alike; name both as exceptions, or none"
            )
    rows = sum(part.shape[0] for part in parts)
    shards = tuple(shard for part in parts for shard in part.shards)
    return evolve(first, name=name, shape=(rows, *first.shape[1:]), shards=shards)


def below(values: Sequence[QuantizedWeight | Tensor]) -> QuantizedWeight | Tensor:
    """Return matrices, or their codes and scales, one below the other."""
    plain = [value for value in values if isinstance(value, Tensor)]
    if plain:
        return torch.cat(plain)
    rounded = [value for value in values if isinstance(value, QuantizedWeight)]
    return QuantizedWeight(
        codes=torch.cat([value.codes for value in rounded]),
        scales=torch.cat([value.scales for value in rounded]),
    )
