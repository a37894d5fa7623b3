"""What a run must know of the other processes that train with it; alone, it is the first of one."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

__all__ = ["StopRequest", "any_of", "barrier", "count", "exchange_device", "rank"]


def rank() -> int:
    """This process's number, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    """Wait until every process is here."""
    if count() > 1:
        dist.barrier()


def any_of(flag: bool) -> bool:
    """Whether the flag of any process is set; all must call it at the same place."""
    if count() == 1:
        return flag
    told = torch.tensor([int(flag)], device=exchange_device())
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told.item())


def exchange_device() -> torch.device:
    """Where a tensor must lie that all processes exchange: the CPU, if their group takes it."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return accelerator


class StopRequest:
    """Whether somebody has asked the run to stop: SIGTERM, or Ctrl-C once."""

    def __init__(self) -> None:
        self.signal_name = ""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals instead of dying of them; a second Ctrl-C ends the run at once."""
        try:
            before = {
                number: signal.signal(number, self._take)
                for number in (signal.SIGTERM, signal.SIGINT)
            }
        except ValueError:  # signals can be taken in the main thread alone
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name

    def agreed(self) -> bool:
        """Whether any process was asked; all of them must call this at the same step."""
        return any_of(bool(self.signal_name))
