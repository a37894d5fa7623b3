"""Thin wrappers of torch.distributed that also work in a single process."""

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from ms_align.interruption import StopSignal

T = TypeVar("T")


def rank() -> int:
    """Return the global rank; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """Return the world size; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    """Wait for all processes."""
    if count() > 1:
        dist.barrier()


def any_of(flag: bool) -> bool:
    """Return True on every process if `flag` is set on any process. Collective."""
    if count() == 1:
        return flag
    flags = torch.tensor([int(flag)], device=exchange_device())
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def broadcast(values: torch.Tensor) -> torch.Tensor:
    """Return the first process's tensor; all processes pass the same shape. Collective."""
    if count() == 1:
        return values
    if values.dtype == torch.int16:  # gloo has no int16
        return broadcast(values.view(torch.uint8)).view(torch.int16)
    sent = values.to(exchange_device())
    dist.broadcast(sent, src=0)
    return sent.cpu()


def pad_to_ranks(rows: Sequence[T], ranks: int) -> list[T]:
    """Repeat the last row until the number of rows is a multiple of `ranks`."""
    return [*rows, *[rows[-1]] * (-len(rows) % ranks)]


def rows_of_rank(count: int, rank: int, ranks: int) -> slice:
    """Return the slice of `count` rows that a data rank gets; `ranks` must divide `count`."""
    size = count // ranks
    return slice(size * rank, size * (rank + 1))


def exchange_device() -> torch.device:
    """Return the device for collectives: the CPU if the process group supports it."""
    accelerator = torch.accelerator.current_accelerator()
    # NCCL alone cannot exchange CPU tensors.
    if accelerator is None or "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return accelerator


class StopRequest(StopSignal):
    """Stop request by SIGTERM or a first Ctrl-C, shared between processes."""

    def agreed(self) -> bool:
        """Return True if any process received a stop signal. Collective: call it at every step."""
        return any_of(bool(self.signal_name))
