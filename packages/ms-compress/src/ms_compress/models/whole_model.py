"""Read a complete model one tensor at a time, from any number of processes that hold its shards.

Each process only stores its shards; rank 0 additionally stores the tensor that is being written.
Weights are quantized where they are stored, so that only codes are sent.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ms_compress.arguments import check_items, check_type
from ms_compress.errors import ExportError
from ms_compress.models.collective import CollectiveWork
from ms_compress.models.experts import checkpoint_names, routers, separated
from ms_compress.models.fused import Fused, fuse, fused_names, stack_rows
from ms_compress.models.head import HEAD, find_head
from ms_compress.models.shards import WholeTensor, local_tensors, merge, rank
from ms_compress.models.wrappers import architecture, check_merged, unwrapped
from ms_compress.quantization.layers import Prepared, drop_gathered, local_part
from ms_compress.quantization.rounding import QuantizedWeight, quantize_weight
from ms_compress.quantization.scheme import Scheme


class WholeModel:
    """A complete model, read tensor by tensor; every process creates it and makes the same reads.

    Args:
        model: complete, or this process's stage or stages; plain, split or sharded.
        stored_dtypes: dtypes in which unprepared floating-point tensors are read, by name; other
            tensors keep their dtype.
        progress: called with the number of tensors that were read, and their total.

    Raises:
        ExportError: the processes together do not have all of a tensor, a value is NaN or infinite,
            or an adapter is not merged.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        stored_dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
        progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        self._progress = progress
        self._names_read: set[str] = set()
        modules = [model] if isinstance(model, nn.Module) else model
        check_items("model", modules, nn.Module, "torch.nn.Modules", error=ExportError)
        check_type("stored_dtypes", stored_dtypes, Mapping, "dtypes by name", error=ExportError)
        if not modules:
            raise ExportError("model must be a torch.nn.Module or a list of stages, got no stage")
        stages = [unwrapped(stage) for stage in modules]
        for stage in stages:
            check_merged(stage)
            drop_gathered(stage)  # FSDP's copies from the last forward may be outdated
        self.stages = tuple(stages)
        """The stages without wrappers."""
        self.config = _config(stages[0])
        self._device = next(stages[0].parameters()).device
        self.collective = CollectiveWork(self._device)
        self._layers: dict[str, nn.Module] = {}
        self._local_tensors: dict[str, Tensor] = {}
        local_entries: dict[str, WholeTensor] = {}
        for stage in stages:
            # a tied head is the embedding's tensor
            excluded = {f"{HEAD}.weight"} if find_head(stage).is_tied else set()
            for entry, layer, tensor in local_tensors(stage):
                if entry.name not in excluded:
                    local_entries[entry.name] = entry
                    self._layers[entry.name] = layer
                    self._local_tensors[entry.name] = tensor
        self._entries = merge(_all_gather(local_entries))  # all ranks know all tensors
        self._fused = _fused(stages[0])  # e.g. q, k and v stored as one tensor
        self.tensors: Mapping[str, WholeTensor] = {
            name: _stored_as(entry, stored_dtypes.get(name))
            for name, entry in fuse(self._entries, self._fused).items()
        }
        """Tensors of the model's folder, in an order that is independent of the layout."""
        # A tied head may have been given a weight of its own since.
        if self.config.get("tie_word_embeddings"):
            self.config["tie_word_embeddings"] = self.is_tied

    @property
    def is_first(self) -> bool:
        """Whether this process receives the tensors."""
        return rank() == 0

    @property
    def is_tied(self) -> bool:
        """Whether the output head uses the embedding's weight and has none itself."""
        return f"{HEAD}.weight" not in self.tensors

    @torch.no_grad()
    def read(self, name: str) -> QuantizedWeight | Tensor | None:
        """Return a complete tensor on rank 0 and None on others; a collective call.

        Returns:
            Codes and scales for a prepared layer's weight, else a plain tensor on the CPU.

        Raises:
            ExportError: a scale is NaN or infinite, or another process failed.
        """
        parts = [self._read(part) for part in self._fused.get(name, (name,))]
        self._names_read.add(name)  # a format may need two parts of a tensor at different times
        self._progress(len(self._names_read), len(self.tensors))
        values = [value for value in parts if value is not None]
        if not values:
            return None
        value = stack_rows(values) if len(values) > 1 else values[0]
        return value.to(self.tensors[name].dtype) if isinstance(value, Tensor) else value

    @torch.no_grad()
    def round_to_stored(self) -> None:
        """Round the model's unprepared tensors to the dtypes in which they are read.

        Raises:
            ExportError: a value is too large for its dtype.
        """
        owners = {part: name for name, parts in self._fused.items() for part in parts}
        for name, tensor in self._local_tensors.items():
            entry = self.tensors[owners.get(name, name)]
            if entry.scheme is not None or entry.dtype == tensor.dtype:
                continue
            rounded = tensor.to(entry.dtype)
            if not bool(local_part(rounded).isfinite().all()):
                raise ExportError(
                    f"{name} has values beyond {entry.dtype}, the dtype in its base folder; convert"
                    " the base folder to float32"
                )
            tensor.copy_(rounded)

    def _read(self, name: str) -> QuantizedWeight | Tensor | None:
        entry = self._entries[name]
        local = self._local(entry)
        # A rank whose quantization failed must stop the others before they wait for its data.
        self.collective.synchronize()
        if entry.scheme is None:
            return self._assemble(entry, local, entry.shape, entry.dtype)
        quantized = self._read_quantized(entry, entry.scheme, local)
        if quantized is None:
            return None
        scales = quantized.scales if quantized.super_scales is None else quantized.super_scales
        if nonfinite := int((~scales.float().isfinite()).sum()):
            raise ExportError(
                f"{name}: {nonfinite} of its scales are NaN or infinite in {entry.scheme};"
                " make its weights or learned scales smaller, or name the layer as an exception"
            )
        return quantized

    def _read_quantized(
        self, entry: WholeTensor, scheme: Scheme, local: Any
    ) -> QuantizedWeight | None:
        """Assemble a quantized weight on rank 0."""
        if scheme.spans_rows:
            # A scale may depend on the shards of several processes, so the weight is sent instead.
            weight, factor = (None, None) if local is None else local
            full = self._assemble(entry, weight, entry.shape, torch.float32)
            return None if full is None else quantize_weight(full, scheme, factor)
        # Only codes and scales are sent, never the float weights.
        codes = self._assemble(
            entry, None if local is None else local.codes, entry.shape, scheme.code_dtype
        )
        rows, features = entry.shape
        shape, group = scheme.scale_shape(rows, features), scheme.group_of(features)
        scales = self._assemble(
            entry, None if local is None else local.scales, shape, scheme.dtype, group=group
        )
        zeros = None
        if not scheme.symmetric:
            zeros = self._assemble(
                entry, None if local is None else local.zeros, shape, torch.int8, group=group
            )
        super_scales = None
        if scheme.super_block is not None:
            block = scheme.super_block
            super_scales = self._assemble(
                entry,
                None if local is None else local.super_scales,
                (rows, features // block.size * block.scales_per_block),
                torch.float16,
                group=block.size // block.scales_per_block,
            )
        if codes is None or scales is None:
            return None
        return QuantizedWeight(
            scheme=scheme, codes=codes, scales=scales, zeros=zeros, super_scales=super_scales
        )

    def _local(self, entry: WholeTensor) -> Any:
        """Return this process's shard, quantized if its layer is prepared; None if it has none."""
        if not any(shard.rank == rank() for shard in entry.shards):
            return None
        local = local_part(self._local_tensors[entry.name].detach())
        layer = self._layers[entry.name]
        if not isinstance(layer, Prepared) or entry.name.rpartition(".")[2] != "weight":
            return local
        mask = layer.stored_mask
        if mask is not None:
            local = local * mask
        if entry.scheme is None:
            return local
        weight = layer.to_compute_dtype(local)
        if entry.scheme.spans_rows:
            return weight.float(), _full_factor(layer)
        factor = None if layer.factor is None else layer.to_compute_dtype(local_part(layer.factor))
        return quantize_weight(weight, entry.scheme, factor)

    def _assemble(
        self,
        entry: WholeTensor,
        local: Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        group: int = 1,
    ) -> Tensor | None:
        """Assemble shards on rank 0; `group` features of the tensor are one element of `shape`."""
        # On the CPU: the complete tensor need not fit on a device.
        full = torch.empty(shape, dtype=dtype) if self.is_first else None
        for shard in entry.shards:
            # Offsets and sizes count features, of which scales have one element per group.
            ratios = (1, group) if len(shape) == 2 else (1,) * len(shape)
            box = tuple(
                slice(start // ratio, (start + size) // ratio)
                for start, size, ratio in zip(shard.offsets, shard.sizes, ratios, strict=True)
            )
            if shard.rank == rank():
                assert local is not None
                if full is not None:
                    full[box] = local.cpu()
                else:
                    # As bytes, since not every backend can send every dtype.
                    dist.send(local.contiguous().flatten().view(torch.uint8), 0)
            elif full is not None:
                # On the device, as NCCL cannot receive into host memory.
                received = torch.empty(full[box].shape, dtype=dtype, device=self._device)
                dist.recv(received.flatten().view(torch.uint8), shard.rank)
                full[box] = received.cpu()
        return full


def _full_factor(layer: Prepared) -> Tensor | None:
    """Return the factor of a layer's scales on the CPU, gathered if FSDP shards it."""
    factor = layer.factor
    if factor is None:
        return None
    full = factor.full_tensor() if isinstance(factor, DTensor) else factor
    return layer.to_compute_dtype(full.detach()).cpu()


def _stored_as(entry: WholeTensor, dtype: torch.dtype | None) -> WholeTensor:
    plain = entry.scheme is None and entry.dtype.is_floating_point
    return evolve(entry, dtype=dtype) if dtype is not None and plain else entry


def _config(model: nn.Module) -> dict[str, Any]:
    """Return the model's config.json as a dict."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        document: dict[str, Any] = config.to_dict()
        document["architectures"] = [architecture(model)]
        return document
    if type(config).__module__.startswith("ms_parallel"):
        from ms_parallel.models.registry import config_document

        return dict(config_document(config, next(model.parameters()).dtype))
    raise ExportError(
        f"{type(model).__name__} has no configuration for config.json; export a model from"
        " transformers or ms_parallel"
    )


def _fused(model: nn.Module) -> Fused:
    """Return the tensors that an ms_parallel model has in parts but its folder has fused."""
    config: Any = getattr(model, "config", None)
    names = checkpoint_names(model, str(getattr(config, "model_type", "")))
    renamed = {stored: (name,) for name, stored in names.items()}
    if type(config).__module__.startswith("ms_parallel"):
        return {**fused_names(config, {name for name, _ in separated(model)}), **renamed}
    if renamed:  # transformers has the router of these families under another name too
        for router in routers(model):
            stored = router.replace(".mlp.", ".block_sparse_moe.")
            renamed[f"{stored}.weight"] = (f"{router}.weight",)
    return renamed


def _all_gather(entries: dict[str, WholeTensor]) -> list[dict[str, WholeTensor]]:
    """Return the local tensors of each process, by rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [entries]
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, entries)
    return by_rank
