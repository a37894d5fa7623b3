"""Rank and world size of this process, before and after the processes have met."""

import os

import torch.distributed as dist

from ms_parallel.errors import LaunchError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """Return whether torchrun, `srun`, or somebody by hand, has said which process this is."""
    return all(name in os.environ for name in VARIABLES)


def rank() -> int:
    """Return this process's number among all, from 0."""
    if dist.is_initialized():
        return dist.get_rank()
    return variable("RANK") if launched() else 0


def world_size() -> int:
    """Return how many processes were started."""
    if dist.is_initialized():
        return dist.get_world_size()
    return variable("WORLD_SIZE") if launched() else 1


def is_first() -> bool:
    """Return whether this is the process that speaks for all."""
    return rank() == 0


def variable(name: str, otherwise: int | None = None) -> int:
    """Read a whole number in the environment, or `otherwise` where there is none of that name.

    Raises:
        LaunchError: it is no whole number.
    """
    value = os.environ.get(name)
    if value is None and otherwise is not None:
        return otherwise
    if value is None or not value.isdecimal():
        shown = repr(value)[:40]
        raise LaunchError(f"{name} is {shown}; it must be a whole number, or use torchrun")
    return int(value)
