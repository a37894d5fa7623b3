"""Rejects arguments that share memory with an argument that the operator writes.

Only addresses are compared, so the accelerator is never synchronized.
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
"""Address, shape, strides and itemsize of a non-empty tensor."""


def check_overlaps(contract: Contract, tensors: Sequence[Tensor]) -> None:
    """Reject an argument that shares memory with a mutated one.

    Under torch.compile, and for tensors without an address, only passing the same tensor twice is
    detected.

    Raises:
        ArgumentError: naming the later of the two.
    """
    layouts = [_layout(tensor) for tensor in tensors]
    for index, argument in enumerate(contract.arguments):
        for earlier_index, earlier in enumerate(contract.arguments[:index]):
            if not (argument.mutated or earlier.mutated):
                continue
            a, b = layouts[earlier_index], layouts[index]
            if tensors[earlier_index] is tensors[index]:
                raise _overlap_error(contract, earlier, argument)
            if a is not None and b is not None and _overlap(a, b):
                raise _overlap_error(contract, earlier, argument)


def _overlap_error(contract: Contract, earlier: Argument, argument: Argument) -> ArgumentError:
    return ArgumentError(
        contract.name,
        argument.name,
        f"in the memory of {earlier.name}",
        "a separate tensor, since the operator writes to it",
    )


def _layout(tensor: Tensor) -> Layout | None:
    if torch.compiler.is_compiling() or transforms_active():
        return None
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return None
    if tensor.device.type == "meta" or not tensor.numel():
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size()


def _overlap(a: Layout, b: Layout) -> bool:
    """Whether two tensors share a byte."""
    # Disjoint address ranges.
    if a[0] >= _end(b) or b[0] >= _end(a):
        return False
    # The address ranges of two columns of one buffer overlap, but no byte is shared.
    start = min(a[0], b[0])
    return _share_bytes((a[0] - start, *a[1:]), (b[0] - start, *b[1:]))


def _end(layout: Layout) -> int:
    """Address after the last byte."""
    start, shape, strides, itemsize = layout
    last = 0
    for size, stride in zip(shape, strides, strict=True):
        last += (size - 1) * stride
    return start + (last + 1) * itemsize


@lru_cache(maxsize=4096)
def _share_bytes(a: Layout, b: Layout) -> bool:
    """Mark all bytes of one tensor, then check whether the other has a marked byte."""
    marks = torch.zeros(max(_end(a), _end(b)), dtype=torch.bool)
    for view in _byte_views(marks, a):
        view.fill_(True)
    return any(bool(view.any()) for view in _byte_views(marks, b))


def _byte_views(marks: Tensor, layout: Layout) -> list[Tensor]:
    """Views of `marks` for byte 0, byte 1, ... of all elements."""
    start, shape, strides, itemsize = layout
    byte_strides = [stride * itemsize for stride in strides]
    return [marks.as_strided(shape, byte_strides, start + byte) for byte in range(itemsize)]
