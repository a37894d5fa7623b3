"""Local parts of distributed tensors."""

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ms_parallel.torch_private import box_offsets, spec_of, with_spec


@frozen(kw_only=True, eq=False)
class Part:
    """A box of a full tensor."""

    local: Tensor
    """The values, writable in place under `torch.no_grad`."""
    offsets: tuple[int, ...]
    """Start of the box in the full tensor, one index per dim."""

    @property
    def box(self) -> tuple[slice, ...]:
        """The box as an index into the full tensor."""
        ends = zip(self.offsets, self.local.shape, strict=True)
        return tuple(slice(start, start + size) for start, size in ends)


def part_of(tensor: Tensor) -> Part:
    """Return this process's part of a tensor; a plain tensor is its own part.

    Supports placements whose local values form one box: replicas, even and uneven shards, and FSDP
    shards of a tensor-parallel shard. Call it under `torch.no_grad`.
    """
    if not isinstance(tensor, DTensor):
        return Part(local=tensor, offsets=(0,) * tensor.ndim)
    return Part(local=tensor.to_local(), offsets=box_offsets(tensor))


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, detached, sharing its storage."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def is_plain_tensor(tensor: Tensor) -> bool:
    """Whether a tensor is a plain tensor, entirely on this process."""
    return not isinstance(tensor, DTensor)


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Gather the full tensor; a collective call for all processes that have a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def wrap_like(tensor: Tensor, local: Tensor) -> Tensor:
    """Wrap `local` as this process's part of a DTensor placed like `tensor`."""
    if not isinstance(tensor, DTensor):
        return local
    if local.device != tensor.to_local().device:  # `from_local` would copy it to the mesh's device
        return with_spec(local, spec_of(tensor))
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this process's part of a parameter's gradient; zeros without a gradient."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(local_part(parameter))
    # A gradient may be placed differently from its parameter.
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)


def drop_gathered(model: nn.Module) -> None:
    """Drop gathered and cast copies of weights from earlier forward passes.

    With FSDP, `model.parameters()` are the shards again; writes to a copy are lost.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        getattr(module, "weights_in_compute_dtype", {}).clear()
