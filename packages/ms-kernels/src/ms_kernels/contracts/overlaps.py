"""Refuses arguments that share memory with one that an operator writes.

Addresses are the host's knowledge, so that no accelerator is waited for.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ms_kernels.contracts.arguments import Argument
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.transforms import transforms_active
from ms_kernels.errors import ArgumentError

Layout = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""Address, shape, strides and size of an element of a tensor that has elements."""


def check_overlaps(contract: Contract, tensors: Sequence[Tensor]) -> None:
    """Refuse an argument that shares memory with one that is written.

    While torch.compile traces, and of tensors without addresses, only the same tensor given twice
    is found.

    Raises:
        ArgumentError: naming the later of the two.
    """
    known = [_layout(each) for each in tensors]
    for place, argument in enumerate(contract.arguments):
        for earlier in range(place):
            before = contract.arguments[earlier]
            if not (argument.mutated or before.mutated):
                continue
            one, other = known[earlier], known[place]
            if tensors[earlier] is tensors[place]:
                raise _shared(contract, before, argument)
            if one is not None and other is not None and _touch(one, other):
                raise _shared(contract, before, argument)


def _shared(contract: Contract, before: Argument, argument: Argument) -> ArgumentError:
    return ArgumentError(
        contract.name,
        argument.name,
        f"in the memory of {before.name}",
        "a tensor of its own, since one of them is written",
    )


def _layout(tensor: Tensor) -> Layout | None:
    if torch.compiler.is_compiling() or transforms_active():
        return None
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return None
    if tensor.device.type == "meta" or not tensor.numel():
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size()


def _touch(one: Layout, other: Layout) -> bool:
    """Return whether two tensors have a byte in common."""
    if one[0] >= _end(other) or other[0] >= _end(one):
        return False
    # Two columns of one buffer lie in each other's range and touch nowhere: look closely.
    least = min(one[0], other[0])
    return _share_bytes((one[0] - least, *one[1:]), (other[0] - least, *other[1:]))


def _end(layout: Layout) -> int:
    """Return the address after the last byte."""
    start, shape, strides, itemsize = layout
    last = 0
    for size, stride in zip(shape, strides, strict=True):
        last += (size - 1) * stride
    return start + (last + 1) * itemsize


@lru_cache(maxsize=4096)
def _share_bytes(one: Layout, other: Layout) -> bool:
    """Mark every byte of one tensor, and look whether one of the other's is marked."""
    marks = torch.zeros(max(_end(one), _end(other)), dtype=torch.bool)
    for place in _bytes(marks, one):
        place.fill_(True)
    return any(bool(place.any()) for place in _bytes(marks, other))


def _bytes(marks: Tensor, layout: Layout) -> list[Tensor]:
    """Return views of the marks of each first byte, each second byte, ... of the elements."""
    start, shape, strides, itemsize = layout
    wide = [stride * itemsize for stride in strides]
    return [marks.as_strided(shape, wide, start + place) for place in range(itemsize)]
