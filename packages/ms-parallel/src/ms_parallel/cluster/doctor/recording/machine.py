"""Facts of this process and machine, from torch and the operating system."""

import ctypes
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress

import torch
import torch.distributed as dist

from ms_parallel.cluster.doctor.recording.recording import Accelerator, Machine
from ms_parallel.cluster.process import rank, variable

PACKAGES = (
    "ms-parallel",
    "ms-data",
    "ms-kernels",
    "torch",
    "torch-npu",
    "triton",
    "safetensors",
    "tokenizers",
)
BACKENDS = ("gloo", "nccl", "hccl", "xccl")
PREFIXES = ("NCCL_", "HCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "ASCEND_RT_", "OMP_NUM_")
NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "ASCEND_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
)
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""Substrings of names of variables that are never recorded."""
SHARED_MEMORY = "/dev/shm"


def this_machine() -> Machine:
    """Collect the facts of this machine, without side effects."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return Machine(
        rank=rank(),
        local_rank=variable("LOCAL_RANK", 0),
        node=variable("GROUP_RANK", variable("SLURM_NODEID", 0)),
        host=socket.gethostname(),
        python=sys.version.split()[0],
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        affinity=sorted(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        free_disk_bytes=shutil.disk_usage(".").free,
        shared_memory_bytes=_size(SHARED_MEMORY),
        accelerators=[] if accelerator is None else _accelerators(accelerator),
        device="cpu" if accelerator is None else accelerator.type,
        backends=[name for name in BACKENDS if _has_backend(name)],
        torchrun=shutil.which("torchrun"),
        packages={name: _version(name) for name in PACKAGES},
        torch_cuda=torch.version.cuda,
        libraries=_libraries(),
        environment=_environment(os.environ),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _accelerators(device: torch.device) -> list[Accelerator]:
    module = torch.get_device_module(device)
    accelerators = []
    for index in range(torch.accelerator.device_count()):
        properties = module.get_device_properties(index)
        memory = int(getattr(properties, "total_memory", 0))
        accelerators.append(Accelerator(name=str(properties.name), memory_bytes=memory))
    return accelerators


def _has_backend(name: str) -> bool:
    check = getattr(dist, f"is_{name}_available", None)
    return dist.is_backend_available(name) if check is None else bool(check())


def _libraries() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"nccl": None, "ibverbs": None}
    if dist.is_nccl_available():
        versions["nccl"] = ".".join(map(str, _nccl_version()))
    with suppress(OSError):
        ctypes.CDLL("libibverbs.so.1")
        versions["ibverbs"] = "1"
    return versions


def _nccl_version() -> tuple[int, ...]:
    from torch.cuda import nccl

    version: tuple[int, ...] = nccl.version()  # type: ignore[no-untyped-call]
    return version


def _size(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(variables.items())
        if (name in NAMES or name.startswith(PREFIXES)) and not any(s in name for s in SECRET)
    }
