"""Offloads saved activations to host memory between the forward and backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from ms_parallel.memory.block_costs import weights_of
from ms_parallel.torch_private import local_of, spec_of

MIN_OFFLOAD_BYTES = 4096
"""Smaller tensors stay on the device: for them launching a copy takes longer than the transfer."""


@frozen(eq=False)
class _OffloadedTensor:
    """Host copy of a saved tensor."""

    host: Tensor
    device: torch.device
    spec: Any
    """DTensor spec if `host` is the local part of a DTensor; None for a plain tensor."""

    def load(self) -> Tensor:
        """Copy the tensor back to its device."""
        local = self.host.to(self.device, non_blocking=True)
        if self.spec is None:
            return local
        dtensor: Tensor = DTensor(local, self.spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return dtensor


@contextmanager
def offloading(stage: nn.Module) -> Iterator[None]:
    """Offload tensors that autograd saves inside the context; load them in the backward pass.

    Copies to pinned memory run on the current stream, so the host does not wait and the device
    memory can be reused by the next operator. A tensor that is saved twice is copied once. Weights
    and CPU tensors are not offloaded.

    Args:
        stage: stage whose weights stay on the device.
    """
    weights = set(weights_of(stage))
    weak_ref: Any = StorageWeakRef  # untyped
    # The weak reference tells a live storage from a new one at the same address.
    offloaded: dict[tuple[Any, ...], tuple[Any, _OffloadedTensor]] = {}

    def pack(tensor: Tensor) -> Tensor | _OffloadedTensor:
        spec = spec_of(tensor) if isinstance(tensor, DTensor) else None
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        if type(local) is not Tensor or local.device.type == "cpu":
            return tensor
        if local.nbytes < MIN_OFFLOAD_BYTES or _is_weight(tensor):
            return tensor
        storage = local.untyped_storage()
        if storage._cdata in weights:
            return tensor
        key = storage._cdata, local.storage_offset(), local.shape, local.stride(), local._version
        entry = offloaded.get(key)
        if entry is None or entry[0].expired():
            host = torch.empty_like(local, device="cpu", pin_memory=True)
            host.copy_(local.detach(), non_blocking=True)
            entry = offloaded[key] = (
                weak_ref(storage),
                _OffloadedTensor(host, local.device, spec),
            )
        return entry[1]

    with saved_tensors_hooks(pack, _unpack):
        yield
    offloaded.clear()


def _unpack(saved: Tensor | _OffloadedTensor) -> Tensor:
    return saved.load() if isinstance(saved, _OffloadedTensor) else saved


def _is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a weight or a view of one, such as a freshly gathered weight."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
