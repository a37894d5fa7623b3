"""Keeps what forwards save for their backward in the machine's memory, and not in the device's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from ms_parallel.split.memory.block_costs import weights_of
from ms_parallel.torch_private import local_of, spec_of

SMALLEST_BYTES = 4096
"""Tensors below it stay: a copy takes longer to begin than they take to send."""


@frozen(eq=False)
class _Away:
    """A saved tensor that lies in the machine's memory."""

    host: Tensor
    device: torch.device
    spec: Any
    """How processes share out the tensor of which it is this one's part; None for a plain one."""

    def back(self) -> Tensor:
        """Copy the tensor back to its device."""
        local = self.host.to(self.device, non_blocking=True)
        if self.spec is None:
            return local
        whole: Tensor = DTensor(local, self.spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return whole


@contextmanager
def offloading(stage: nn.Module) -> Iterator[None]:
    """Send what is saved to pinned memory while the block runs, and back when it is asked for.

    Copies run in the order of the device's work, so that no one waits for them here, and memory of
    the device is free for what runs next. A tensor that is saved twice is copied once. Weights
    stay, and so does what lies in the machine's memory already.

    Args:
        stage: whose weights stay.
    """
    weights = set(weights_of(stage))
    watch: Any = StorageWeakRef  # untyped
    sent: dict[tuple[Any, ...], tuple[Any, _Away]] = {}

    def keep(tensor: Tensor) -> Tensor | _Away:
        spec = spec_of(tensor) if isinstance(tensor, DTensor) else None
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        if type(local) is not Tensor or local.device.type == "cpu":
            return tensor
        if local.nbytes < SMALLEST_BYTES or _is_weight(tensor):
            return tensor
        memory = local.untyped_storage()
        if memory._cdata in weights:
            return tensor
        place = memory._cdata, local.storage_offset(), local.shape, local.stride(), local._version
        known = sent.get(place)
        if known is None or known[0].expired():
            host = torch.empty_like(local, device="cpu", pin_memory=True)
            host.copy_(local.detach(), non_blocking=True)
            known = sent[place] = watch(memory), _Away(host, local.device, spec)
        return known[1]

    with saved_tensors_hooks(keep, _back):
        yield
    sent.clear()


def _back(kept: Tensor | _Away) -> Tensor:
    return kept.back() if isinstance(kept, _Away) else kept


def _is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a weight or a view of one, such as one that was just gathered."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
