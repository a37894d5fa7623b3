"""A model's tensors, one whole tensor at a time, from however many processes hold parts of it.

No process ever holds more than its part of the model; the first one also holds the tensor that is
being written. Weights are rounded where they lie, so what travels is codes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ms_compress.errors import ExportError
from ms_compress.models.collective import Together
from ms_compress.models.selection import is_tied
from ms_compress.models.wrappers import architecture, bare_name, check_merged, unwrapped
from ms_compress.quantisation.layers import FACTOR, Prepared, drop_gathered
from ms_compress.quantisation.rounding import Quantised, quantise
from ms_compress.quantisation.scheme import Activations, Scheme

__all__ = ["Entry", "Source"]

HEAD = "lm_head.weight"


@frozen(kw_only=True)
class Part:
    """Where a box of a whole tensor lies."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strange: int
    """How many of its values are NaN or infinite."""


@frozen(kw_only=True)
class Entry:
    """One tensor of the model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    """The layer's kind: `linear`, `embedding` or `other`."""
    scheme: Scheme | None
    """Of a prepared layer's weight."""
    activations: Activations | None
    """How that layer rounds its input."""
    parts: tuple[Part, ...]

    @property
    def module(self) -> str:
        """The layer's name."""
        return self.name.rpartition(".")[0]


class Source:
    """A whole model to be read tensor by tensor; every process builds it and reads alike.

    Args:
        model: whole, or this process's stage or stages of it; plain, split or sharded.

    Raises:
        ExportError: the processes do not hold all of a tensor between them, a value is NaN or
            infinite, or an adapter is not merged.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module]) -> None:
        given = [model] if isinstance(model, nn.Module) else list(model)
        stages = [unwrapped(stage) for stage in given]
        for stage in stages:
            check_merged(stage)
            drop_gathered(stage)
        self.config = _config(stages[0])
        self._device = next(stages[0].parameters()).device
        self.together = Together(self._device)
        self._layers: dict[str, nn.Module] = {}
        self._own: dict[str, Tensor] = {}
        offers: dict[str, Entry] = {}
        for stage in stages:
            for entry, layer, tensor in _offers(stage, tied=_is_tied(stage, self.config)):
                offers[entry.name] = entry
                self._layers[entry.name] = layer
                self._own[entry.name] = tensor
        self.entries: Mapping[str, Entry] = _merge(_exchange(offers))
        """In an order that does not depend on the layout."""
        if self.config.get("tie_word_embeddings"):
            self.config["tie_word_embeddings"] = HEAD not in self.entries

    @property
    def is_first(self) -> bool:
        """Whether this process gets what is read."""
        return _rank() == 0

    @torch.no_grad()
    def read(self, name: str) -> Quantised | Tensor | None:
        """A whole tensor on the first process, None on others. All processes must call it alike.

        Returns:
            Codes and scales of a prepared layer's weight, else a plain tensor on the CPU.

        Raises:
            ExportError: a scale is NaN or infinite, or another process failed.
        """
        entry = self.entries[name]
        mine = self._local(entry)
        self.together.go_on()
        if entry.scheme is None:
            return self._assemble(entry, mine, entry.shape, entry.dtype, ratio=1)
        group = entry.scheme.group_of(entry.shape[1])
        codes = self._assemble(
            entry, None if mine is None else mine.codes, entry.shape, torch.int8, ratio=1
        )
        shape = (entry.shape[0], entry.shape[1] // group)
        scales = self._assemble(
            entry, None if mine is None else mine.scales, shape, entry.scheme.dtype, ratio=group
        )
        if codes is None or scales is None:
            return None
        if strange := int((~scales.isfinite()).sum()):
            raise ExportError(
                f"{name}: {strange} of its scales are NaN or infinite as {entry.scheme} has them;"
                " make its weights or learned scales smaller, or name the layer as an exception"
            )
        return Quantised(codes=codes, scales=scales)

    def _local(self, entry: Entry) -> Any:
        """This process's part, rounded if its layer is; None if it holds none."""
        if not any(part.rank == _rank() for part in entry.parts):
            return None
        parameter = self._own[entry.name].detach()
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        layer = self._layers[entry.name]
        if not isinstance(layer, Prepared) or entry.name.rpartition(".")[2] != "weight":
            return local
        mask = layer.stored_mask
        if mask is not None:
            local = local * mask
        if entry.scheme is None:
            return local
        factor = layer.factor
        if isinstance(factor, DTensor):
            factor = factor.to_local()
        if factor is not None:
            factor = layer.as_computed(factor)
        return quantise(layer.as_computed(local), entry.scheme, factor)

    def _assemble(
        self,
        entry: Entry,
        mine: Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        ratio: int,
    ) -> Tensor | None:
        """Put boxes together on the first process; `ratio` features of a box are one of `shape`."""
        rank = _rank()
        whole = torch.empty(shape, dtype=dtype) if rank == 0 else None
        for part in entry.parts:
            if len(shape) == 2:
                box = (
                    slice(part.offsets[0], part.offsets[0] + part.sizes[0]),
                    slice(part.offsets[1] // ratio, (part.offsets[1] + part.sizes[1]) // ratio),
                )
            else:
                box = tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))  # type: ignore[assignment]
            if part.rank == rank:
                assert mine is not None
                if whole is not None:
                    whole[box] = mine.cpu()
                else:
                    dist.send(mine.contiguous().flatten().view(torch.uint8), 0)
            elif whole is not None:
                got = torch.empty(whole[box].shape, dtype=dtype, device=self._device)
                dist.recv(got.flatten().view(torch.uint8), part.rank)
                whole[box] = got.cpu()
        return whole


def _is_tied(stage: nn.Module, config: Mapping[str, Any]) -> bool:
    """Whether the head has no weight of its own; a model built so may have been given one since."""
    embeddings = [each for each in stage.modules() if isinstance(each, nn.Embedding)]
    shared = not embeddings or any(is_tied(stage, each) for each in embeddings)
    return bool(config.get("tie_word_embeddings")) and shared


def _offers(stage: nn.Module, *, tied: bool) -> Iterator[tuple[Entry, nn.Module, Tensor]]:
    """Each tensor that a stage holds a part of, with its layer."""
    for path, layer in stage.named_modules():
        prefix = bare_name(path)
        for key, tensor in _kept(layer):
            name = f"{prefix}.{key}" if prefix else key
            if not (tied and name == HEAD):
                yield _offer(name, layer, tensor), layer, tensor


def _kept(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A layer's own tensors that have a place in a file: parameters and persistent buffers."""
    for key, parameter in layer.named_parameters(recurse=False):
        if key != FACTOR:
            yield key, parameter
    for key, buffer in layer.named_buffers(recurse=False):
        if key not in layer._non_persistent_buffers_set:
            yield key, buffer


def _offer(name: str, layer: nn.Module, tensor: Tensor) -> Entry:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    part = Part(
        rank=_rank(),
        offsets=_box(tensor),
        sizes=tuple(local.shape),
        strange=int((~local.detach().isfinite()).sum()),
    )
    kinds = {nn.Linear: "linear", nn.Embedding: "embedding"}
    is_weight = name.rpartition(".")[2] == "weight"
    prepared = layer if isinstance(layer, Prepared) and is_weight else None
    return Entry(
        name=name,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        kind=next((word for each, word in kinds.items() if isinstance(layer, each)), "other"),
        scheme=None if prepared is None else prepared.scheme,
        activations=None if prepared is None else prepared.activations,
        parts=(part,),
    )


def _merge(offers: list[dict[str, Entry]]) -> dict[str, Entry]:
    """Entries of the whole model; of boxes that several processes hold, the first's."""
    names = {name for each in offers for name in each}
    entries = {}
    for name in sorted(names, key=_natural):
        holders = [each[name] for each in offers if name in each]
        boxes: dict[tuple[int, ...], Part] = {}
        for holder in holders:
            (part,) = holder.parts
            if all(part.sizes) or not part.sizes:
                boxes.setdefault(part.offsets, part)
        first = holders[0]
        if strange := sum(part.strange for part in boxes.values()):
            raise ExportError(
                f"{name}: {strange} of its values are NaN or infinite; no code stands for them:"
                " look at the training, or at the folder that it was read from"
            )
        covered = sum(torch.Size(part.sizes).numel() for part in boxes.values())
        if covered != torch.Size(first.shape).numel():
            raise ExportError(
                f"{name}: the processes hold {covered} of {torch.Size(first.shape).numel()} values;"
                " export from every process of the layout"
            )
        entries[name] = evolve(first, parts=tuple(boxes.values()))
    return entries


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Layer 2 before layer 10."""
    return [
        (piece.isdigit(), int(piece) if piece.isdigit() else 0, piece)
        for piece in re.split(r"[._]", name)
    ]


def _box(tensor: Tensor) -> tuple[int, ...]:
    """Where this process's part of a tensor begins."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(chunks[0].offsets) if chunks else (0,) * tensor.ndim


def _config(model: nn.Module) -> dict[str, Any]:
    """The model's config.json."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        document: dict[str, Any] = config.to_dict()
        document["architectures"] = [architecture(model)]
        return document
    if type(config).__module__.startswith("ms_parallel"):
        from ms_parallel.models.registry import config_document

        return dict(config_document(config, next(model.parameters()).dtype))
    raise ExportError(
        f"{type(model).__name__} has no configuration that says how it is built; export a model of"
        " transformers or of ms_parallel"
    )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _exchange(value: dict[str, Entry]) -> list[dict[str, Entry]]:
    """Everyone's offers, by rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
