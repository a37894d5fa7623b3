"""The other processes that train with this one; a process alone is the first of one."""

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from ms_align.interruption import StopSignal

T = TypeVar("T")


def rank() -> int:
    """Return this process's number, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """Return how many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    """Wait until every process is here."""
    if count() > 1:
        dist.barrier()


def any_of(flag: bool) -> bool:
    """Return whether the flag of any process is set; all must call it at the same place."""
    if count() == 1:
        return flag
    flags = torch.tensor([int(flag)], device=exchange_device())
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def pad_to_ranks(rows: Sequence[T], ranks: int) -> list[T]:
    """Repeat the last row until the rows divide by `ranks`, as every rank must have as many."""
    return [*rows, *[rows[-1]] * (-len(rows) % ranks)]


def rows_of_rank(count: int, rank: int, ranks: int) -> slice:
    """Return which of `count` rows, a multiple of `ranks`, are those of a data rank."""
    share = count // ranks
    return slice(share * rank, share * (rank + 1))


def exchange_device() -> torch.device:
    """Return the device for tensors that all processes exchange: the CPU, if the group takes it."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return accelerator


class StopRequest(StopSignal):
    """Whether somebody has asked the run to stop: SIGTERM, or Ctrl-C once."""

    def agreed(self) -> bool:
        """Return whether any process was asked; all of them must call this at the same step."""
        return any_of(bool(self.signal_name))
