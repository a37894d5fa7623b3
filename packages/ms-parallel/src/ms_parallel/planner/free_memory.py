"""How much more memory a process may take: of its device, or of the machine and its limits."""

import ctypes
import gc
import os
import resource
from pathlib import Path, PurePosixPath

import torch

SHARE = 0.95
"""Share of free memory that may be taken: allocators leave gaps."""
KEPT_FREE = 16 << 20
"""Bytes that are left of what `ulimit` allows: two threads that begin later take as much, as their
stacks count."""
M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 1 << 17
"""The setting's number in malloc.h, and the size that it begins with."""
STACK_BYTES, ATTRIBUTE_BYTES = 1 << 20, 256
"""A thread's stack, where other systems give less; and more than any pthread_attr_t takes."""
LIMITS = (("VmSize", resource.RLIMIT_AS), ("VmData", resource.RLIMIT_DATA))
"""What of a process the limits that `ulimit -v` and `ulimit -d` set are held against."""


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process may take besides what it holds.

    On a CPU this is its share of what the machine and its group of processes (cgroup v2, as in a
    container) have left, and no more than `ulimit` leaves it.
    """
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[0] * SHARE)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with open("/proc/meminfo", encoding="ascii") as file:
        facts = dict(line.split(":", 1) for line in file)
    shared = [int(facts["MemAvailable"].split()[0]) * 1024, *_left_by_groups()]
    return int(min(min(shared) / here, left_by_limits()) * SHARE)


def status_bytes(name: str) -> int:
    """Read one of the kernel's counts of this process's bytes, such as `VmRSS`."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        found = next(line for line in file if line.startswith(f"{name}:"))
    return int(found.split()[1]) * 1024


def give_back() -> None:
    """Give the system back what is free in this process, so that all that it takes can be seen."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def map_blocks() -> None:
    """Have blocks of 128 KiB and more be mapped, so that what is given back is free at once.

    glibc begins so, and lets blocks of up to 32 MiB into its heap as some come back. A place there
    is a little too small for the next aligned block of its size: runs held up to twice their
    tensors. The price are pages that are made anew for each block.
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc
    if setting is not None:
        setting(M_MMAP_THRESHOLD, MAPPED_BYTES)


def shrink_stacks() -> None:
    """Have threads that begin later take 1 MiB for their stacks, which `ulimit` counts whole.

    A backend begins some ten for each group of processes; glibc gives each as much as `ulimit -s`.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "pthread_setattr_default_np"):  # of glibc
        return
    settings = ctypes.create_string_buffer(ATTRIBUTE_BYTES)
    library.pthread_attr_init(settings)
    library.pthread_attr_setstacksize(settings, ctypes.c_size_t(STACK_BYTES))
    library.pthread_setattr_default_np(settings)
    library.pthread_attr_destroy(settings)


def left_by_limits() -> float:
    """Count the bytes that `ulimit` leaves besides what is held; infinite without a limit."""
    left = [float("inf")]
    for name, limit in LIMITS:
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            left.append(max(0, most - status_bytes(name) + _reusable_bytes() - KEPT_FREE))
    return min(left)


class _Mallinfo(ctypes.Structure):
    """What glibc says of its memory: ten numbers, of which the ninth is what is free in it."""

    _fields_ = tuple((f"field{at}", ctypes.c_size_t) for at in range(10))


def _reusable_bytes() -> int:
    """Count the bytes that are free in the C library and still count against the limits."""
    look = getattr(ctypes.CDLL(None), "mallinfo2", None)  # of glibc
    if look is None:
        return 0
    look.restype = _Mallinfo
    return int(look().field8)  # fordblks


def _left_by_groups(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """List the bytes that each group of this process has left, from its own to the outermost."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    place = PurePosixPath(own.lstrip("/"))
    return [
        left
        for folder in (root / place, *(root / each for each in place.parents))
        if (left := _left_in(folder)) is not None
    ]


def _left_in(folder: Path) -> int | None:
    try:
        most = (folder / "memory.max").read_text(encoding="ascii").strip()
        if most == "max":
            return None
        return max(0, int(most) - int((folder / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no such group, or not of version 2
        return None
