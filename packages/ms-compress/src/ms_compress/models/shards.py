"""Shards of a model's tensors on each process, merged into a description of the complete model.

Each process describes its shard of each tensor; merged, the descriptions give for every tensor of
the complete model which process stores which part.
"""

import re
from collections.abc import Iterator

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ms_compress.errors import ExportError
from ms_compress.models.wrappers import bare_name
from ms_compress.quantization.layers import FACTOR, INPUT_PEAK, Prepared, local_part
from ms_compress.quantization.scheme import Activations, Scheme


@frozen(kw_only=True)
class Shard:
    """Part of a tensor that one process stores."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nonfinite: int
    """Number of its values that are NaN or infinite."""


@frozen(kw_only=True)
class WholeTensor:
    """A tensor of the complete model, with the location of its parts."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    """Type of the layer: `linear`, `embedding` or `other`."""
    scheme: Scheme | None
    """Scheme of a prepared layer's weight."""
    activations: Activations | None
    """Input rounding of the layer."""
    shards: tuple[Shard, ...]
    input_peak: float | None = None
    """Largest input magnitude of the layer, if its input scales are calibrated."""

    @property
    def module(self) -> str:
        """Name of the layer."""
        return self.name.rpartition(".")[0]


def local_tensors(stage: nn.Module) -> Iterator[tuple[WholeTensor, nn.Module, Tensor]]:
    """Yield a stage's local shards: description, layer and tensor.

    These are parameters and persistent buffers, without learned scales and calibrated inputs, which
    files store in another form.
    """
    for path, layer in stage.named_modules():
        prefix = bare_name(path)
        persistent = (
            (key, buffer)
            for key, buffer in layer.named_buffers(recurse=False)
            if key not in layer._non_persistent_buffers_set
        )
        for key, tensor in (*layer.named_parameters(recurse=False), *persistent):
            if key not in (FACTOR, INPUT_PEAK):
                name = f"{prefix}.{key}" if prefix else key
                yield _describe(name, layer, tensor), layer, tensor


def _describe(name: str, layer: nn.Module, tensor: Tensor) -> WholeTensor:
    local = local_part(tensor)
    shard = Shard(
        rank=rank(),
        offsets=_offsets(tensor),
        sizes=tuple(local.shape),
        nonfinite=int((~local.detach().isfinite()).sum()),
    )
    layer_kinds = {nn.Linear: "linear", nn.Embedding: "embedding"}
    is_weight = name.rpartition(".")[2] == "weight"
    prepared = layer if isinstance(layer, Prepared) and is_weight else None
    peak = None if prepared is None else prepared.input_peak
    return WholeTensor(
        name=name,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        kind=next((kind for cls, kind in layer_kinds.items() if isinstance(layer, cls)), "other"),
        scheme=None if prepared is None else prepared.scheme,
        activations=None if prepared is None else prepared.activations,
        shards=(shard,),
        input_peak=None if peak is None else float(peak),
    )


def merge(by_rank: list[dict[str, WholeTensor]]) -> dict[str, WholeTensor]:
    """Merge the tensors of each process into the tensors of the complete model.

    If several processes store the same shard, the first one is used.

    Raises:
        ExportError: the processes do not have all of a tensor, or a value is NaN or infinite.
    """
    names = {name for tensors in by_rank for name in tensors}
    merged = {}
    # The order must not depend on the layout, as files are identical for every layout.
    for name in sorted(names, key=_natural_order):
        holders = [tensors[name] for tensors in by_rank if name in tensors]
        shards: dict[tuple[int, ...], Shard] = {}
        for holder in holders:
            (shard,) = holder.shards
            # Skip empty shards, as with more ranks than rows. A scalar has no sizes.
            if all(shard.sizes) or not shard.sizes:
                shards.setdefault(shard.offsets, shard)  # replicas have the same offsets
        first = holders[0]
        if nonfinite := sum(shard.nonfinite for shard in shards.values()):
            raise ExportError(
                f"{name}: {nonfinite} of its values are NaN or infinite and cannot be quantized;"
                " check the training, or the folder that it was loaded from"
            )
        # Shards with different offsets do not overlap, so the counts tell if any is missing.
        covered = sum(torch.Size(shard.sizes).numel() for shard in shards.values())
        if covered != torch.Size(first.shape).numel():
            raise ExportError(
                f"{name}: the processes have {covered} of {torch.Size(first.shape).numel()} values;"
                " export from every process of the layout"
            )
        # Processes with other rows of a batch have observed other inputs.
        peaks = [holder.input_peak for holder in holders if holder.input_peak is not None]
        merged[name] = evolve(
            first, shards=tuple(shards.values()), input_peak=max(peaks, default=None)
        )
    return merged


def rank() -> int:
    """Return this process's rank; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def _natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    return [
        (word.isdigit(), int(word) if word.isdigit() else 0, word)
        for word in re.split(r"[._]", name)
    ]


def _offsets(tensor: Tensor) -> tuple[int, ...]:
    """Return the offsets of this process's shard in a tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    # torch's own description of a shard for checkpoints, which also covers uneven shards.
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(chunks[0].offsets) if chunks else (0,) * tensor.ndim
