"""Measures what a block keeps and computes again under each kind of recomputation."""

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

from ms_parallel.split.memory.recompute_choice import KINDS
from ms_parallel.split.memory.selective import is_kept
from ms_parallel.split.part import local_part
from ms_parallel.torch_private import (
    AsyncCollectiveTensor,
    TorchDispatchMode,
    checkpoint,
    fsdp_parameters,
    gathered_weight,
    tree_leaves,
)

WORK_OF_A_BYTE = 8
"""What writing a byte of a result counts as, in floating-point operations: operators that are not
products are as slow as memory is, and a processor does some operations while it moves a byte."""


@frozen(kw_only=True)
class BlockCosts:
    """Costs of one block and one microbatch, by kind in the order of `KINDS`, as in every run."""

    kept_bytes: tuple[int, ...]
    """Held from the forward to the backward, weights apart."""
    work: tuple[int, ...]
    """Floating-point operations that the backward does again."""


class _Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the work of what runs, and the bytes of results that `selective` keeps."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.all = self.of_attention = self.not_kept = 0
        self.inside = False
        self.kept: list[int] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.is_view:
            return made
        size_bytes = sum(storages([made]).values())
        work = _work(func, args, kwargs or {}, made, size_bytes)
        self.all += work
        self.of_attention += work if self.inside else 0
        if is_kept(func):
            self.kept.append(size_bytes)
        else:
            self.not_kept += work
        return made

    @contextmanager
    def counting(self, attention: nn.Module | None) -> Iterator[None]:
        """Add up, and know what is part of attention."""
        handles: list[Any] = []

        def enter(*_: Any) -> None:
            self.inside = True

        def leave(*_: Any) -> None:
            self.inside = False

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


def _work(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any, size_bytes: int
) -> int:
    count = flop_registry.get(func.overloadpacket)
    if count is not None:
        return int(count(*args, **kwargs, out_val=made))
    if is_kept(func) and len(args) >= 3:  # attention that torch counts on accelerators alone
        q, k, v = args[:3]
        return int(2 * q.numel() * k.shape[-2] * (1 + v.shape[-1] / q.shape[-1]))
    return WORK_OF_A_BYTE * size_bytes


def measure_block(
    block: nn.Module, attention: nn.Module | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> BlockCosts:
    """Run a block's forward with these arguments, twice if it has attention, and count.

    Call it where its weights are gathered, its recomputation is switched off, and what it decided
    is not decided anew. Hooks of the block itself do not run.

    Args:
        block: of which kept tensors that enter it count, and what all blocks share does not.
        attention: its attention, if it has one, whose recomputation may be switched on.
        args: the hidden states.
        kwargs: what is shared by all blocks, such as angles and documents.
    """
    work = _Work()
    with work.counting(attention):
        saved = _saved(block, args, kwargs)
    shared = storages([kwargs]) | weights_of(block)
    entering = _without(storages(args), shared)
    none = sum(_without(saved | entering, shared).values())
    whole = sum(entering.values())
    selective = whole + sum(work.kept[:-1])
    partly = none
    if attention is not None:
        with _checkpointed(attention):
            partly = sum(_without(_saved(block, args, kwargs) | entering, shared).values())
    bytes_of = {"none": none, "selective": selective, "attention": partly, "full": whole}
    work_of = {
        "none": 0,
        "selective": work.not_kept,
        "attention": work.of_attention,
        "full": work.all,
    }
    return BlockCosts(
        kept_bytes=tuple(bytes_of[kind] for kind in KINDS),
        work=tuple(work_of[kind] for kind in KINDS),
    )


def storages(values: Any, *, floating: bool = False) -> dict[int, int]:
    """Count the bytes of all tensors' memory in `values`, by what tells it apart while it lives.

    Args:
        values: of lists, tables and dataclasses, however deep.
        floating: whether only tensors of floating-point numbers count.
    """
    found: dict[int, int] = {}
    waiting = [values]
    while waiting:
        for leaf in tree_leaves(waiting.pop()):
            if isinstance(leaf, Tensor):
                if leaf.is_floating_point() or not floating:
                    memory = _memory(leaf)
                    found[memory._cdata] = memory.nbytes()
            elif is_dataclass(leaf) and not isinstance(leaf, type):
                waiting.append(list(vars(leaf).values()))
    return found


def weights_of(module: nn.Module) -> dict[int, int]:
    """Count the bytes of a module's weights, of those that FSDP has gathered too, as `storages`."""
    gathered = [
        gathered_weight(each)
        for part in module.modules()
        if isinstance(part, FSDPModule)
        for each in fsdp_parameters(part)
    ]
    return storages([*module.parameters(), *gathered])


def _memory(tensor: Tensor) -> torch.UntypedStorage:
    # An alias of an ordinary tensor among fake ones would have memory of its own.
    part = local_part(tensor) if isinstance(tensor, DTensor) else tensor
    # What a collective may still be writing is a wrapper without memory of its own.
    if isinstance(part, AsyncCollectiveTensor):
        part = part.elem
    return part.untyped_storage()


def _saved(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, int]:
    """Count the memory that the graph of a forward keeps."""
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved.update(storages([tensor]))
        return tensor.detach()  # the tensor itself could keep its own graph alive

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        made = block.forward(*args, **kwargs)
    del made
    return saved


def _without(found: dict[int, int], others: dict[int, int]) -> dict[int, int]:
    return {place: size for place, size in found.items() if place not in others}


@contextmanager
def _checkpointed(module: nn.Module) -> Iterator[None]:
    state = checkpoint.state(module)
    state.enable_hook = True
    try:
        yield
    finally:
        state.enable_hook = False
