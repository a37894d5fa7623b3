"""Writes the command that starts this program in as many processes as a layout needs."""

import os
import shlex
import sys
from pathlib import Path

import torch

CPU_SHARE = 4
"""Processes a core, where a layout is only tried."""


def launch_command(processes: int) -> str:
    """Write the line to type, on each of several hosts where one has too few devices or cores."""
    words = shlex.join([*_program(), *sys.argv[1:]])
    room = _processes_a_host()
    if processes <= room:
        return f"type: torchrun --standalone --nproc-per-node {processes} {words}"
    each = max(n for n in range(1, room + 1) if processes % n == 0)
    return (
        f"this host has room for {room}; on each of {processes // each} hosts type: torchrun"
        f" --nnodes {processes // each} --nproc-per-node {each} --rdzv-backend c10d"
        f" --rdzv-endpoint FIRST_HOST:29500 {words}"
    )


def _program() -> list[str]:
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__")]
    if Path(sys.argv[0]).name == "ms-parallel":
        return ["-m", "ms_parallel"]
    return [sys.argv[0] or "train.py"]


def _processes_a_host() -> int:
    """Count a host's places: one a device; without any, four a core, which is slow but works."""
    return torch.accelerator.device_count() or CPU_SHARE * len(os.sched_getaffinity(0))
