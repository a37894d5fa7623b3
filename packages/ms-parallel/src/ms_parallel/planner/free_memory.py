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
    return int(min(min(shared) / here, *_left_by_limits()) * SHARE)


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


def _left_by_limits() -> list[float]:
    left = [float("inf")]
    for name, limit in LIMITS:
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            left.append(max(0, most - status_bytes(name) + _reusable_bytes() - KEPT_FREE))
    return left


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
