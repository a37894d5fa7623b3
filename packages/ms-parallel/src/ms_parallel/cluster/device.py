"""Device of a process."""

import contextlib
import os

import torch

from ms_parallel.cluster import process
from ms_parallel.cluster.mixed.devices import Devices
from ms_parallel.errors import LaunchError

DeviceSpec = str | torch.device | Devices | None
"""A device name, a device, `Devices` with one per rank, or None for the machine's best."""

LEARNED_BYTES = 31 << 20
"""Just under glibc's largest adaptive threshold (DEFAULT_MMAP_THRESHOLD_MAX)."""


def pick_device(device: DeviceSpec = None) -> torch.device:
    """Return this process's device: `device`, or its local rank's accelerator, or the CPU.

    Raises:
        LaunchError: the machine has no such device, or fewer devices than processes.
    """
    if isinstance(device, Devices):
        if len(device.names) > 1 and process.world_size() == 1 and not process.launched():
            return torch.device("cpu")  # a layout for other processes is only being inspected
        device.check_world(process.world_size())
        device = device.of_rank(process.rank(), process.variable("LOCAL_RANK", 0))
    requested = None if device is None else _device(device)
    if requested is not None and requested.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        if device is None:
            return torch.device("cpu")
        raise LaunchError(
            f"device {str(device)!r} was requested but this machine has no accelerator; use 'cpu'"
        )
    if requested is not None and requested.type != accelerator.type:
        raise LaunchError(
            f"device {str(device)!r} was requested but this machine has {accelerator.type}; use"
            f" {accelerator.type!r}"
        )
    index = None if requested is None else requested.index
    index = int(os.environ.get("LOCAL_RANK", "0")) if index is None else index
    if index >= torch.accelerator.device_count():
        raise LaunchError(
            f"process {index} of this machine has no {accelerator.type} device: "
            f"{torch.accelerator.device_count()} found; start fewer processes or use device 'cpu'"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def keep_freed_pages(device: torch.device) -> None:
    """Make a CPU's allocator keep freed memory, so that steps do not fault in new pages.

    glibc maps large blocks and trims its heap at adaptive thresholds: the largest block freed so
    far, up to 32 MiB, and twice that. A small model never frees such a block, so its heap would
    grow and shrink in every step. The block allocated here is never touched. If blocks are mapped
    on purpose, or a memory limit is too low, nothing happens.
    """
    if device.type == "cpu":
        with contextlib.suppress(RuntimeError):  # torch's error if out of memory
            torch.empty(LEARNED_BYTES, dtype=torch.uint8)


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LaunchError(
            f"{name!r} is not a device; use 'cpu' or an accelerator such as 'cuda:0'"
        ) from error
    if str(device) != str(name):  # torch keeps eight bits of the index: cuda:300 becomes cuda:44
        raise LaunchError(f"{name!r} is not a device; no machine has that many")
    return device
