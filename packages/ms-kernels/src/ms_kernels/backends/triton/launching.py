"""Launches a kernel over a number of tiles: along one axis, in pieces that the chip takes.

A kernel is named by its module and function, and imported with Triton by the first launch.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

MOST_PROGRAMS = {"npu": 65_520}
"""Programs of one launch by device type; a multiple of 16, so that no kernel is specialized anew.

Ascend takes 65,535 in all; elsewhere the limit of one axis is 2³¹ - 1.
"""

TILES = 2**31 - 1
"""Tiles of one operator: their number is 32 bits wide in the kernels."""


@cache
def kernel(name: str) -> Any:
    """Import the Triton function ``"MODULE.FUNCTION"``, the module by its whole name."""
    module, _, function = name.rpartition(".")
    return getattr(import_module(module), function)


def launch(name: str, tiles: int, near: Tensor, *arguments: Any, **constants: Any) -> None:
    """Run `tiles` programs of a kernel on the device of `near`.

    Args:
        name: of a Triton function whose first argument is the first tile of a launch.
        tiles: how many; 0 launches nothing.
        near: a tensor on the device to run on.
        *arguments: the kernel's, after the first.
        **constants: its compile-time constants, and Triton's launch options.
    """
    assert tiles <= TILES, f"{tiles} tiles; no memory holds what takes as many"
    most = MOST_PROGRAMS.get(near.device.type, TILES)
    if near.device.type == "cuda":  # said outright: Triton's default is about to change
        constants["enable_fp_fusion"] = True
    with _on(near.device):
        for first in range(0, tiles, most):
            kernel(name)[(min(most, tiles - first),)](first, *arguments, **constants)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one, which Triton launches on."""
    if device.type == "cpu":  # Triton's interpreter
        return nullcontext()
    return torch.accelerator.device_index(device.index)


def blocks(count: int, size: int) -> int:
    """Return how many blocks of `size` hold `count` elements."""
    return -(-count // size)


def power_of_two(size: int) -> int:
    """Return the least power of two that is no less than `size`."""
    return 1 << max(size - 1, 0).bit_length()
