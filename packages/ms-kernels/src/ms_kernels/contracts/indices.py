"""Checks of indices, which are data and therefore looked at on the CPU alone.

Where torch itself refuses a bad index they are looked at once it has, to say which is wrong; else
before. On an accelerator that would wait for the device: kernels do not read what is out of range.
"""

import torch
from torch import Tensor

from ms_kernels.contracts.transforms import transforms_active
from ms_kernels.errors import ArgumentError


def check_classes(
    operator: str, targets: Tensor, count: int, ignore_index: int, name: str = "targets"
) -> None:
    """Refuse a class that is neither from 0 to count - 1 nor `ignore_index`."""
    if not readable(targets):
        return
    wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= count))]
    if wrong.numel():
        got, fits = f"{wrong[0].item()} somewhere", f"from 0 to {count - 1}, or {ignore_index}"
        raise ArgumentError(operator, name, got, fits)


def check_range(operator: str, name: str, indices: Tensor, count: int) -> None:
    """Refuse an index that is not from 0 to count - 1."""
    if not readable(indices):
        return
    wrong = indices[(indices < 0) | (indices >= count)]
    if wrong.numel():
        raise ArgumentError(
            operator, name, f"{wrong[0].item()} somewhere", f"from 0 to {count - 1}"
        )


def readable(tensor: Tensor) -> bool:
    """Return whether its numbers can be looked at without waiting for a device."""
    if torch.compiler.is_compiling() or transforms_active():
        return False
    return type(tensor) is Tensor and tensor.device.type == "cpu"
