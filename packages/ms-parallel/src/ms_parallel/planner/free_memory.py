"""Memory that a process can still allocate: of its device, or of the machine and its limits."""

import ctypes
import gc
import os
import resource
from pathlib import Path, PurePosixPath

import torch

USABLE = 0.95
"""Fraction of free memory that may be used, as allocators leave gaps."""
RESERVE_BYTES = 16 << 20
"""Reserve below a `ulimit`, for the stacks of two threads that start later."""
M_MMAP_THRESHOLD, MMAP_BYTES = -3, 1 << 17
"""Number of the option in malloc.h, and its initial value."""
STACK_BYTES, ATTRIBUTE_BYTES = 1 << 20, 256
"""Stack size of a thread if others have less, and an upper bound on the size of pthread_attr_t."""
LIMITS = (("VmSize", resource.RLIMIT_AS), ("VmData", resource.RLIMIT_DATA))
"""Process sizes that `ulimit -v` and `ulimit -d` limit."""


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can allocate in addition to its current memory.

    On a CPU this is its share of the memory left by the machine and by its control groups (cgroup
    v2, as in containers), limited by `ulimit`.
    """
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[0] * USABLE)
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    shared = [int(fields["MemAvailable"].split()[0]) * 1024, *_cgroup_headroom()]
    return int(min(min(shared) / local_processes, ulimit_headroom()) * USABLE)


def status_bytes(name: str) -> int:
    """Read a memory size of this process from the kernel, such as `VmRSS`."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def release_free_memory() -> None:
    """Return free heap memory to the system, so that memory use can be measured."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def map_blocks() -> None:
    """Make glibc map blocks of 128 KiB and more, so that freed ones are returned at once.

    This is glibc's initial threshold, which it raises to up to 32 MiB as blocks are freed. Blocks
    in the heap fragment it: a gap is slightly too small for the next aligned block of equal size,
    and runs held up to twice the size of their tensors. The cost is that every block faults in new
    pages.
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if setting is not None:
        setting(M_MMAP_THRESHOLD, MMAP_BYTES)


def shrink_stacks() -> None:
    """Reduce the stacks of future threads to 1 MiB, as `ulimit` counts their full size.

    A backend starts about ten threads per process group; by default each has the size of
    `ulimit -s`.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "pthread_setattr_default_np"):  # glibc only
        return
    settings = ctypes.create_string_buffer(ATTRIBUTE_BYTES)
    library.pthread_attr_init(settings)
    library.pthread_attr_setstacksize(settings, ctypes.c_size_t(STACK_BYTES))
    library.pthread_setattr_default_np(settings)
    library.pthread_attr_destroy(settings)


def ulimit_headroom() -> float:
    """Bytes that can be allocated within `ulimit`; infinite without a limit."""
    headroom = [float("inf")]
    for name, limit in LIMITS:
        limit_bytes = resource.getrlimit(limit)[0]
        if limit_bytes != resource.RLIM_INFINITY:
            headroom.append(
                max(0, limit_bytes - status_bytes(name) + _reusable_bytes() - RESERVE_BYTES)
            )
    return min(headroom)


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2; fordblks is the ninth of its ten sizes."""

    _fields_ = tuple((f"field{index}", ctypes.c_size_t) for index in range(10))


def _reusable_bytes() -> int:
    """Free bytes in the heap, which still count against the limits."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc only
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    return int(mallinfo().field8)  # fordblks


def _cgroup_headroom(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Bytes left in each control group of this process, from the innermost outward."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    # The line of cgroup v2 has hierarchy number 0 and no controllers.
    path_text = next((line[3:] for line in lines if line.startswith("0::")), "/")
    group_path = PurePosixPath(path_text.lstrip("/"))
    # The limits of all ancestors apply as well.
    return [
        headroom
        for folder in (root / group_path, *(root / parent for parent in group_path.parents))
        if (headroom := _group_headroom(folder)) is not None
    ]


def _group_headroom(folder: Path) -> int | None:
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        return max(0, int(limit) - int((folder / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no such group, or version 1
        return None
