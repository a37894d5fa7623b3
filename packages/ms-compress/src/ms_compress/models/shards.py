"""A model's tensors as the processes hold them, and what they are together.

Each process states the shard that it holds of each tensor; merged, these statements say of every
tensor of the whole model where its values lie.
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
from ms_compress.quantisation.layers import FACTOR, Prepared, local_part
from ms_compress.quantisation.scheme import Activations, Scheme


@frozen(kw_only=True)
class Shard:
    """The part of a tensor that one process holds."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nonfinite: int
    """How many of its values are NaN or infinite."""


@frozen(kw_only=True)
class WholeTensor:
    """One tensor of the whole model: what it is, and where its values lie."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    """The layer's kind: `linear`, `embedding` or `other`."""
    scheme: Scheme | None
    """The scheme of a prepared layer's weight."""
    activations: Activations | None
    """How that layer rounds its input."""
    shards: tuple[Shard, ...]

    @property
    def module(self) -> str:
        """The layer's name."""
        return self.name.rpartition(".")[0]


def held_tensors(stage: nn.Module) -> Iterator[tuple[WholeTensor, nn.Module, Tensor]]:
    """Yield each tensor that a stage holds a shard of, its layer, and the tensor itself.

    These are parameters and persistent buffers, but not learned scales, which no file holds.
    """
    for path, layer in stage.named_modules():
        prefix = bare_name(path)
        persistent = (
            (key, buffer)
            for key, buffer in layer.named_buffers(recurse=False)
            if key not in layer._non_persistent_buffers_set
        )
        for key, tensor in (*layer.named_parameters(recurse=False), *persistent):
            if key != FACTOR:
                name = f"{prefix}.{key}" if prefix else key
                yield _held(name, layer, tensor), layer, tensor


def _held(name: str, layer: nn.Module, tensor: Tensor) -> WholeTensor:
    local = local_part(tensor)
    shard = Shard(
        rank=rank(),
        offsets=_offsets(tensor),
        sizes=tuple(local.shape),
        nonfinite=int((~local.detach().isfinite()).sum()),
    )
    kinds = {nn.Linear: "linear", nn.Embedding: "embedding"}
    is_weight = name.rpartition(".")[2] == "weight"
    prepared = layer if isinstance(layer, Prepared) and is_weight else None
    return WholeTensor(
        name=name,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        kind=next((word for each, word in kinds.items() if isinstance(layer, each)), "other"),
        scheme=None if prepared is None else prepared.scheme,
        activations=None if prepared is None else prepared.activations,
        shards=(shard,),
    )


def merge(held: list[dict[str, WholeTensor]]) -> dict[str, WholeTensor]:
    """Merge what each process holds, by rank, into the tensors of the whole model.

    Of shards that several processes hold, the first one's is taken.

    Raises:
        ExportError: the processes do not hold all of a tensor, or a value is NaN or infinite.
    """
    names = {name for each in held for name in each}
    tensors = {}
    for name in sorted(names, key=_natural_order):
        holders = [each[name] for each in held if name in each]
        shards: dict[tuple[int, ...], Shard] = {}
        for holder in holders:
            (shard,) = holder.shards
            if all(shard.sizes) or not shard.sizes:
                shards.setdefault(shard.offsets, shard)
        first = holders[0]
        if nonfinite := sum(shard.nonfinite for shard in shards.values()):
            raise ExportError(
                f"{name}: {nonfinite} of its values are NaN or infinite; no code stands for them:"
                " look at the training, or at the folder that it was read from"
            )
        covered = sum(torch.Size(shard.sizes).numel() for shard in shards.values())
        if covered != torch.Size(first.shape).numel():
            raise ExportError(
                f"{name}: the processes hold {covered} of {torch.Size(first.shape).numel()} values;"
                " export from every process of the layout"
            )
        tensors[name] = evolve(first, shards=tuple(shards.values()))
    return tensors


def rank() -> int:
    """Return this process's rank; 0 where it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def _natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts layer 2 before layer 10."""
    return [
        (word.isdigit(), int(word) if word.isdigit() else 0, word)
        for word in re.split(r"[._]", name)
    ]


def _offsets(tensor: Tensor) -> tuple[int, ...]:
    """Return where this process's shard of a tensor begins."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(chunks[0].offsets) if chunks else (0,) * tensor.ndim
