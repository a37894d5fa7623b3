"""`torch.rig`: only the functions that torch requires of a device module.

A package that calls anything else on `torch.get_device_module()` relies on functions that a vendor
may not have.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from ms_rig_extension import default_generator
from torch import Tensor, accelerator

__all__ = ["Event", "Stream", "current_device", "device", "device_count", "is_available"]

current_device = accelerator.current_device_index
set_device = accelerator.set_device_index
device_count = torch._C._accelerator_hooks_device_count
current_stream = accelerator.current_stream
set_stream = accelerator.set_stream
synchronize = accelerator.synchronize
empty_cache = accelerator.empty_cache
memory_allocated = accelerator.memory_allocated
max_memory_allocated = accelerator.max_memory_allocated


def is_available() -> bool:
    """Whether this process has a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """There is nothing to initialize."""
    return True


def _lazy_init() -> None:
    """There is nothing to initialize."""


def _is_in_bad_fork() -> bool:
    return False


def is_bf16_supported() -> bool:
    """The CPU's kernels know bfloat16."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What autocast may use."""
    return [torch.float16, torch.bfloat16]


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """Name and memory, as CUDA and NPUs call them."""
    return SimpleNamespace(name=f"rig {_index(device)}", total_memory=8 << 30)


class Stream(torch.Stream):
    """A stream of the device; its work is done at once."""

    def __new__(cls, device: Any = None, priority: int = 0) -> "Stream":
        """Create a stream, by default on the current device."""
        new: Stream = super().__new__(cls, torch.device("rig", _index(device)), priority=priority)
        return new


class Event(torch.Event):
    """An event of the device."""

    def __new__(cls, enable_timing: bool = False) -> "Event":
        """Create an event, optionally with timing."""
        event: Event = super().__new__(cls, torch.device("rig"), enable_timing=enable_timing)
        return event


@contextmanager
def stream(target: torch.Stream | None) -> Iterator[None]:
    """Work on another stream inside."""
    before = current_stream()
    set_stream(target or before)
    try:
        yield
    finally:
        set_stream(before)


@contextmanager
def device(target: Any) -> Iterator[None]:
    """Work on another device inside."""
    before = current_device()
    set_device(_index(target))
    try:
        yield
    finally:
        set_device(before)


def manual_seed(seed: int) -> None:
    """Seed the current device's random numbers."""
    default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the random numbers of all devices; `torch.manual_seed` calls this."""
    for index in range(device_count()):
        default_generator(index).manual_seed(seed)


def initial_seed() -> int:
    """The current device's seed."""
    return int(default_generator(current_device()).initial_seed())


def get_rng_state(device: Any = "rig") -> Tensor:
    """Sixteen bytes on the CPU: seed and offset."""
    state: Tensor = default_generator(_index(device)).get_state()
    return state


def set_rng_state(new_state: Tensor, device: Any = "rig") -> None:
    """Restore the state of the random numbers."""
    default_generator(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    """The states of every device."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[Tensor]) -> None:
    """Set the state of every device."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index
