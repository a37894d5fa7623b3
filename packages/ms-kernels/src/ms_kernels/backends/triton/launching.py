"""Kernel launches over a one-dimensional grid of tiles, split to the chip's launch limit.

A kernel is named by its module and function; the first launch imports it together with Triton.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

MAX_PROGRAMS = {"npu": 65_520}
"""Maximum programs per launch by device type; a multiple of 16 avoids another specialization.

Ascend allows 65,535 in total; elsewhere the limit of one axis is 2³¹ - 1.
"""

TILES = 2**31 - 1
"""Maximum tiles per operator: kernels hold the tile index in 32 bits."""


@cache
def kernel(name: str) -> Any:
    """Import the Triton function ``"MODULE.FUNCTION"``, with the module's full name."""
    module, _, function = name.rpartition(".")
    return getattr(import_module(module), function)


def launch(name: str, tiles: int, like: Tensor, *arguments: Any, **constants: Any) -> None:
    """Run `tiles` programs of a kernel on the device of `like`.

    Args:
        name: Triton function whose first argument is the index of the launch's first tile.
        tiles: number of programs; 0 launches nothing.
        like: any tensor on the device to run on.
        *arguments: the kernel's arguments after the first.
        **constants: compile-time constants and Triton launch options.
    """
    assert tiles <= TILES, f"{tiles} tiles exceed the limit of {TILES}"
    max_programs = MAX_PROGRAMS.get(like.device.type, TILES)
    if like.device.type == "cuda":  # explicit: Triton's default is going to change
        constants["enable_fp_fusion"] = True
    with _on(like.device):
        for first in range(0, tiles, max_programs):
            kernel(name)[(min(max_programs, tiles - first),)](first, *arguments, **constants)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current device, where Triton launches."""
    if device.type == "cpu":  # Triton's interpreter
        return nullcontext()
    return torch.accelerator.device_index(device.index)


def blocks(count: int, size: int) -> int:
    """Return the number of blocks of `size` elements that cover `count` elements."""
    return -(-count // size)


def power_of_two(size: int) -> int:
    """Return the smallest power of two greater than or equal to `size`."""
    return 1 << max(size - 1, 0).bit_length()
