"""Checks of index values, on the CPU only.

If torch itself raises on a bad index, the check runs afterwards to name the index; otherwise it
runs before. On an accelerator a check would synchronize, so kernels skip out-of-range indices.
"""

import torch
from torch import Tensor

from ms_kernels.contracts.transforms import transforms_active
from ms_kernels.errors import ArgumentError


def check_classes(
    operator: str, targets: Tensor, count: int, ignore_index: int, name: str = "targets"
) -> None:
    """Reject classes outside 0 to count - 1, except `ignore_index`."""
    if not readable(targets):
        return
    wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= count))]
    if wrong.numel():
        got, fits = f"out of range ({wrong[0].item()})", f"from 0 to {count - 1}, or {ignore_index}"
        raise ArgumentError(operator, name, got, fits)


def check_range(operator: str, name: str, indices: Tensor, count: int) -> None:
    """Reject indices outside 0 to count - 1."""
    if not readable(indices):
        return
    wrong = indices[(indices < 0) | (indices >= count)]
    if wrong.numel():
        raise ArgumentError(
            operator, name, f"out of range ({wrong[0].item()})", f"from 0 to {count - 1}"
        )


def readable(tensor: Tensor) -> bool:
    """Whether the values can be read without a device synchronization."""
    if torch.compiler.is_compiling() or transforms_active():
        return False
    return type(tensor) is Tensor and tensor.device.type == "cpu"
