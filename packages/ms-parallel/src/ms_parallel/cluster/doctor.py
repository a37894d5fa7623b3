"""Examines what this machine has for training."""

import importlib.metadata
import os
import platform
import shutil
import sys

import msgspec
import torch
import torch.distributed as dist

PACKAGES = ("ms-parallel", "ms-data", "ms-kernels", "torch", "safetensors", "tokenizers")


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One device."""

    name: str
    memory_bytes: int
    """0 where the device does not say."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What was found."""

    python: str
    system: str
    cores: int
    """Cores that this process may use."""
    memory_bytes: int
    free_disk_bytes: int
    """Free bytes on the disk of the current folder."""
    accelerators: list[Accelerator]
    device: str
    """Device that a run uses if none is asked for."""
    backends: list[str]
    """Backends of torch.distributed that work here."""
    torchrun: str | None
    """Path of torchrun; None if it is not on PATH."""
    packages: dict[str, str | None]
    """Versions; None is not installed."""
    problems: list[str]
    """What keeps a run from starting, with the remedy."""


def examine() -> Machine:
    """Look at this machine; starts nothing and changes nothing."""
    packages = {name: _version(name) for name in PACKAGES}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return Machine(
        python=sys.version.split()[0],
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        free_disk_bytes=shutil.disk_usage(".").free,
        accelerators=[] if accelerator is None else _accelerators(accelerator),
        device="cpu" if accelerator is None else accelerator.type,
        backends=[name for name in ("gloo", "nccl", "hccl", "xccl") if _has_backend(name)],
        torchrun=shutil.which("torchrun"),
        packages=packages,
        problems=_problems(packages),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _accelerators(kind: torch.device) -> list[Accelerator]:
    module = torch.get_device_module(kind)
    found = []
    for index in range(torch.accelerator.device_count()):
        properties = module.get_device_properties(index)
        memory = int(getattr(properties, "total_memory", 0))
        found.append(Accelerator(name=str(properties.name), memory_bytes=memory))
    return found


def _has_backend(name: str) -> bool:
    check = getattr(dist, f"is_{name}_available", None)
    return dist.is_backend_available(name) if check is None else bool(check())


def _problems(packages: dict[str, str | None]) -> list[str]:
    problems = []
    if not dist.is_available():
        problems.append("torch has no distributed support; install a build that has it")
    if packages["ms-data"] is None:
        problems.append("ms-data is missing, datasets cannot be read: pip install ms-data")
    if shutil.which("torchrun") is None:
        problems.append("torchrun is not on PATH; use python -m torch.distributed.run instead")
    return problems
