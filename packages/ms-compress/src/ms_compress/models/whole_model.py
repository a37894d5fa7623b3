"""A whole model, read one tensor at a time from however many processes hold shards of it.

No process ever holds more than its shards; the first one also holds the tensor that is being
written. Weights are rounded where they lie, so what travels is codes.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn

from ms_compress.errors import ExportError
from ms_compress.models.collective import CollectiveWork
from ms_compress.models.fused import Fused, below, fuse, fused_names
from ms_compress.models.head import HEAD, find_head
from ms_compress.models.shards import WholeTensor, held_tensors, merge, rank
from ms_compress.models.wrappers import architecture, check_merged, unwrapped
from ms_compress.quantisation.layers import Prepared, drop_gathered, local_part
from ms_compress.quantisation.rounding import QuantizedWeight, quantize_weight


class WholeModel:
    """A whole model to be read tensor by tensor; every process builds it and reads alike.

    Args:
        model: whole, or this process's stage or stages of it; plain, split or sharded.
        stored_dtypes: dtypes that unprepared floating-point tensors are read in, by name; others
            keep their own.

    Raises:
        ExportError: the processes do not hold all of a tensor between them, a value is NaN or
            infinite, or an adapter is not merged.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        stored_dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> None:
        given = [model] if isinstance(model, nn.Module) else list(model)
        stages = [unwrapped(stage) for stage in given]
        for stage in stages:
            check_merged(stage)
            drop_gathered(stage)
        self.stages = tuple(stages)
        """Without the wrappers around them."""
        self.config = _config(stages[0])
        self._device = next(stages[0].parameters()).device
        self.collective = CollectiveWork(self._device)
        self._layers: dict[str, nn.Module] = {}
        self._own: dict[str, Tensor] = {}
        held: dict[str, WholeTensor] = {}
        for stage in stages:
            left_out = {f"{HEAD}.weight"} if find_head(stage).is_tied else set()
            for entry, layer, tensor in held_tensors(stage):
                if entry.name not in left_out:
                    held[entry.name] = entry
                    self._layers[entry.name] = layer
                    self._own[entry.name] = tensor
        self._held = merge(_exchange(held))
        self._fused = _fused(stages[0])
        self.tensors: Mapping[str, WholeTensor] = {
            name: _stored_as(entry, stored_dtypes.get(name))
            for name, entry in fuse(self._held, self._fused).items()
        }
        """Tensors of its folder, in an order that does not depend on the layout."""
        if self.config.get("tie_word_embeddings"):
            self.config["tie_word_embeddings"] = self.is_tied

    @property
    def is_first(self) -> bool:
        """Whether this process gets what is read."""
        return rank() == 0

    @property
    def is_tied(self) -> bool:
        """Whether the output head is the embedding's weight, and has none of its own."""
        return f"{HEAD}.weight" not in self.tensors

    @torch.no_grad()
    def read(self, name: str) -> QuantizedWeight | Tensor | None:
        """Return a whole tensor on the first process, None on others, which must call it alike.

        Returns:
            Codes and scales of a prepared layer's weight, else a plain tensor on the CPU.

        Raises:
            ExportError: a scale is NaN or infinite, or another process failed.
        """
        parts = [self._read(part) for part in self._fused.get(name, (name,))]
        values = [value for value in parts if value is not None]
        if not values:
            return None
        value = below(values) if len(values) > 1 else values[0]
        return value.to(self.tensors[name].dtype) if isinstance(value, Tensor) else value

    @torch.no_grad()
    def round_to_stored(self) -> None:
        """Round the model's own unprepared tensors to the dtypes that they are read in.

        Raises:
            ExportError: a value is too large for its dtype.
        """
        owners = {part: name for name, parts in self._fused.items() for part in parts}
        for name, tensor in self._own.items():
            entry = self.tensors[owners.get(name, name)]
            if entry.scheme is not None or entry.dtype == tensor.dtype:
                continue
            rounded = tensor.to(entry.dtype)
            if not bool(local_part(rounded).isfinite().all()):
                raise ExportError(
                    f"{name} has values beyond {entry.dtype}, which its base folder stores; convert"
                    " the base folder to float32"
                )
            tensor.copy_(rounded)

    def _read(self, name: str) -> QuantizedWeight | Tensor | None:
        entry = self._held[name]
        local = self._local(entry)
        self.collective.synchronise()
        if entry.scheme is None:
            return self._assemble(entry, local, entry.shape, entry.dtype)
        group = entry.scheme.group_of(entry.shape[1])
        codes = self._assemble(
            entry, None if local is None else local.codes, entry.shape, torch.int8
        )
        shape = (entry.shape[0], entry.shape[1] // group)
        scales = self._assemble(
            entry, None if local is None else local.scales, shape, entry.scheme.dtype, group=group
        )
        if codes is None or scales is None:
            return None
        if nonfinite := int((~scales.isfinite()).sum()):
            raise ExportError(
                f"{name}: {nonfinite} of its scales are NaN or infinite as {entry.scheme} has them;"
                " make its weights or learned scales smaller, or name the layer as an exception"
            )
        return QuantizedWeight(codes=codes, scales=scales)

    def _local(self, entry: WholeTensor) -> Any:
        """Return this process's shard, rounded if its layer is; None if it holds none."""
        if not any(shard.rank == rank() for shard in entry.shards):
            return None
        local = local_part(self._own[entry.name].detach())
        layer = self._layers[entry.name]
        if not isinstance(layer, Prepared) or entry.name.rpartition(".")[2] != "weight":
            return local
        mask = layer.stored_mask
        if mask is not None:
            local = local * mask
        if entry.scheme is None:
            return local
        factor = None if layer.factor is None else layer.to_compute_dtype(local_part(layer.factor))
        return quantize_weight(layer.to_compute_dtype(local), entry.scheme, factor)

    def _assemble(
        self,
        entry: WholeTensor,
        local: Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        group: int = 1,
    ) -> Tensor | None:
        """Put shards together on the first process; `group` features are one of `shape`."""
        whole = torch.empty(shape, dtype=dtype) if self.is_first else None
        for shard in entry.shards:
            ratios = (1, group) if len(shape) == 2 else (1,) * len(shape)
            box = tuple(
                slice(start // ratio, (start + size) // ratio)
                for start, size, ratio in zip(shard.offsets, shard.sizes, ratios, strict=True)
            )
            if shard.rank == rank():
                assert local is not None
                if whole is not None:
                    whole[box] = local.cpu()
                else:
                    dist.send(local.contiguous().flatten().view(torch.uint8), 0)
            elif whole is not None:
                got = torch.empty(whole[box].shape, dtype=dtype, device=self._device)
                dist.recv(got.flatten().view(torch.uint8), shard.rank)
                whole[box] = got.cpu()
        return whole


def _stored_as(entry: WholeTensor, dtype: torch.dtype | None) -> WholeTensor:
    plain = entry.scheme is None and entry.dtype.is_floating_point
    return evolve(entry, dtype=dtype) if dtype is not None and plain else entry


def _config(model: nn.Module) -> dict[str, Any]:
    """Return the model's config.json."""
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


def _fused(model: nn.Module) -> Fused:
    """Find the tensors that an ms_parallel model's folder holds and the model has in parts."""
    config: Any = getattr(model, "config", None)
    ours = type(config).__module__.startswith("ms_parallel")
    return fused_names(config) if ours else {}


def _exchange(held: dict[str, WholeTensor]) -> list[dict[str, WholeTensor]]:
    """Return what each process holds, by rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [held]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, held)
    return every
