"""Rank and world size of this process, before and after the process group is initialized."""

import os

import torch.distributed as dist

from ms_parallel.errors import LaunchError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """Return whether the environment has this process's rank, from torchrun, `srun` or the user."""
    return all(name in os.environ for name in VARIABLES)


def rank() -> int:
    """Global rank of this process."""
    if dist.is_initialized():
        return dist.get_rank()
    return variable("RANK") if launched() else 0


def world_size() -> int:
    """Number of processes."""
    if dist.is_initialized():
        return dist.get_world_size()
    return variable("WORLD_SIZE") if launched() else 1


def is_first() -> bool:
    """Return whether this is rank 0."""
    return rank() == 0


def variable(name: str, default: int | None = None) -> int:
    """Read an integer from the environment, or return `default` if it is not set.

    Raises:
        LaunchError: the value is not an integer.
    """
    value = os.environ.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdecimal():
        shown = repr(value)[:40]
        raise LaunchError(f"{name} must be a whole number, got {shown}; set it, or use torchrun")
    return int(value)
