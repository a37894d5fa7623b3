"""Measures the saved activations and the recomputed work of a block in each recompute mode."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from ms_parallel.memory.modes import RECOMPUTE_MODES
from ms_parallel.memory.selective import is_expensive
from ms_parallel.torch_private import (
    AsyncCollectiveTensor,
    TorchDispatchMode,
    checkpoint,
    fsdp_parameters,
    gathered_weight,
    tree_leaves,
)

FLOPS_PER_BYTE = 8
"""FLOPs charged for each byte that a memory-bound operator writes. Elementwise operators run at
memory speed, and a processor does a few operations in the time it takes to move a byte."""


@frozen(kw_only=True)
class BlockCosts:
    """Costs of one block for one microbatch, indexed in the order of `RECOMPUTE_MODES`."""

    kept_bytes: tuple[int, ...]
    """Activations saved from the forward to the backward pass, in bytes, without weights."""
    flops: tuple[int, ...]
    """FLOPs recomputed in the backward pass."""


class _FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs of all operators, and the bytes that `selective` saves."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total_flops = self.attention_flops = self.cheap_flops = 0
        self.in_attention = False
        self.saved_sizes: list[int] = []
        """Bytes of each expensive operator's result, in order."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        # Views allocate nothing.
        if func.is_view:
            return output
        size_bytes = sum(storages([output]).values())
        flops = _flops(func, args, kwargs or {}, output, size_bytes)
        self.total_flops += flops
        self.attention_flops += flops if self.in_attention else 0
        if is_expensive(func):
            self.saved_sizes.append(size_bytes)
        else:
            self.cheap_flops += flops
        return output

    @contextmanager
    def counting(self, attention: nn.Module | None) -> Iterator[None]:
        """Count FLOPs inside the block; those inside `attention` also count as attention's."""
        handles: list[Any] = []

        def enter(*_: Any) -> None:
            self.in_attention = True

        def leave(*_: Any) -> None:
            self.in_attention = False

        if attention is not None:
            handles = [
                attention.register_forward_pre_hook(enter, prepend=True),
                attention.register_forward_hook(leave),
            ]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()


def _flops(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any, size_bytes: int
) -> int:
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=output))
    # Fused attention on CPUs, for which torch has no formula: 2·Sq·Sk·D for each of QK and PV.
    if is_expensive(func) and len(args) >= 3:
        q, k, v = args[:3]
        return int(2 * q.numel() * k.shape[-2] * (1 + v.shape[-1] / q.shape[-1]))
    return FLOPS_PER_BYTE * size_bytes


def measure_block(
    block: nn.Module, attention: nn.Module | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> BlockCosts:
    """Run a block's forward pass (twice if it has attention) and measure its costs.

    Call it with the weights gathered, checkpointing of the block switched off, and the router's
    earlier decisions replayed. Forward hooks of the block itself do not run.

    Args:
        block: block to measure. Its inputs count as saved; tensors in `kwargs` do not.
        attention: its attention module, on which checkpointing can be switched on; or None.
        args: the hidden states.
        kwargs: inputs shared by all blocks, such as rotary tables and document numbers.
    """
    counter = _FlopCounter()
    with counter.counting(attention):
        # Nothing is checkpointed here: this is what autograd saves in mode `none`.
        saved = _saved(block, args, kwargs)
    shared = storages([kwargs]) | weights_of(block)
    inputs = _without(storages(args), shared)
    none_bytes = sum(_without(saved | inputs, shared).values())
    full_bytes = sum(inputs.values())
    # The last expensive result is dropped when the block ends, see `selective.save_results`.
    selective_bytes = full_bytes + sum(counter.saved_sizes[:-1])
    attention_bytes = none_bytes
    if attention is not None:
        # Run once more, with attention checkpointed.
        with _checkpointed(attention):
            attention_bytes = sum(_without(_saved(block, args, kwargs) | inputs, shared).values())
    bytes_by_mode = {
        "none": none_bytes,
        "selective": selective_bytes,
        "attention": attention_bytes,
        "full": full_bytes,
    }
    flops_by_mode = {
        "none": 0,
        "selective": counter.cheap_flops,
        "attention": counter.attention_flops,
        "full": counter.total_flops,
    }
    return BlockCosts(
        kept_bytes=tuple(bytes_by_mode[mode] for mode in RECOMPUTE_MODES),
        flops=tuple(flops_by_mode[mode] for mode in RECOMPUTE_MODES),
    )


def storages(values: Any, *, floating: bool = False) -> dict[int, int]:
    """Return the size in bytes of each distinct storage in `values`, keyed by storage address.

    A key identifies a storage only while it is alive.

    Args:
        values: tensors in nested lists, dicts and dataclasses.
        floating: count only floating-point tensors.
    """
    sizes: dict[int, int] = {}
    queue = [values]
    while queue:
        for leaf in tree_leaves(queue.pop()):
            if isinstance(leaf, Tensor):
                if leaf.is_floating_point() or not floating:
                    storage = _storage(leaf)
                    sizes[storage._cdata] = storage.nbytes()
            elif is_dataclass(leaf) and not isinstance(leaf, type):
                queue.append(list(vars(leaf).values()))
    return sizes


def weights_of(module: nn.Module) -> dict[int, int]:
    """Return the storages of a module's weights, including FSDP's gathered copies."""
    gathered = [
        gathered_weight(param)
        for submodule in module.modules()
        if isinstance(submodule, FSDPModule)
        for param in fsdp_parameters(submodule)
    ]
    return storages([*module.parameters(), *gathered])


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    # Under FakeTensorMode an alias of a real tensor has a new storage: detach only DTensors.
    local = tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor
    # The output of a pending collective is a wrapper without storage.
    if isinstance(local, AsyncCollectiveTensor):
        local = local.elem
    return local.untyped_storage()


def _saved(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, int]:
    """Return the storages that autograd saves in a forward pass."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.update(storages([tensor]))
        return tensor.detach()  # an undetached output would keep its own graph alive

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block.forward(*args, **kwargs)
    del output
    return saved


def _without(sizes: dict[int, int], excluded: dict[int, int]) -> dict[int, int]:
    return {key: size for key, size in sizes.items() if key not in excluded}


@contextmanager
def _checkpointed(module: nn.Module) -> Iterator[None]:
    state = checkpoint.state(module)
    state.enable_hook = True
    try:
        yield
    finally:
        state.enable_hook = False
