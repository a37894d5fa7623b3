"""The device that a process computes on."""

import contextlib
import os

import torch

from ms_parallel.cluster import process
from ms_parallel.cluster.mixed.devices import Devices
from ms_parallel.errors import LaunchError

Wanted = str | torch.device | Devices | None
"""A device: its name, or what says which rank has which; None for the machine's best."""

LEARNED_BYTES = 31 << 20
"""A block of nearly the most that glibc learns from (DEFAULT_MMAP_THRESHOLD_MAX)."""


def pick_device(device: Wanted = None) -> torch.device:
    """Pick this process's device: `device` if given, else its local rank's accelerator, else CPU.

    An accelerator is never invented: a process beyond the machine's devices is a `LaunchError`.
    """
    if isinstance(device, Devices):
        if len(device.names) > 1 and process.world_size() == 1 and not process.launched():
            return torch.device("cpu")  # a run of other processes is only looked at
        device.check_world(process.world_size())
        device = device.of_rank(process.rank(), process.variable("LOCAL_RANK", 0))
    asked = None if device is None else _device(device)
    if asked is not None and asked.type == "cpu":
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        if device is None:
            return torch.device("cpu")
        raise LaunchError(
            f"device {str(device)!r} was asked for but this machine has no accelerator; use 'cpu'"
        )
    if asked is not None and asked.type != found.type:
        raise LaunchError(
            f"device {str(device)!r} was asked for but this machine has {found.type}; give that"
        )
    index = None if asked is None else asked.index
    index = int(os.environ.get("LOCAL_RANK", "0")) if index is None else index
    if index >= torch.accelerator.device_count():
        raise LaunchError(
            f"process {index} of this machine has no {found.type} of its own: "
            f"{torch.accelerator.device_count()} found; start fewer processes or use device 'cpu'"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(found.type, index)


def keep_freed_pages(device: torch.device) -> None:
    """Have a CPU's allocator keep what it is given back, so that no step makes its pages anew.

    glibc maps large blocks and trims its heap at sizes that it learns: the largest block that came
    back, up to 32 MiB, and twice that. A small model gives back no such block, and its heap grows
    and shrinks in each step. What is asked for here is never touched. Where blocks are mapped on
    purpose, or a limit leaves less, nothing is learned.
    """
    if device.type == "cpu":
        with contextlib.suppress(RuntimeError):  # torch's, where memory is out
            torch.empty(LEARNED_BYTES, dtype=torch.uint8)


def _device(name: str | torch.device) -> torch.device:
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise LaunchError(f"device {name!r} is none; give 'cpu' or an accelerator") from error
    if str(found) != str(name):  # torch keeps eight bits of a number: cuda:300 would be cuda:44
        raise LaunchError(f"device {name!r} is none; no machine has so many")
    return found
