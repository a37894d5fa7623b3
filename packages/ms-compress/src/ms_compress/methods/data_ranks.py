"""Calibration over several processes, each on its share of the batches.

Every process holds the full model. Statistics are summed in the order of the ranks, so the same
number of processes gives the same bits, and another number the same result up to float32 rounding.
"""

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ms_compress.arguments import check_integer, check_type
from ms_compress.errors import ConfigError
from ms_compress.models.collective import CollectiveWork

T = TypeVar("T")


class DataRanks:
    """Processes that share calibration batches; a context manager.

    If a process fails, the block ends on all processes: every collective first exchanges errors.
    The block uses the default process group and creates it if necessary.

    Args:
        rank: rank of this process.
        count: number of processes.

    Raises:
        ConfigError: count is below 1, or rank is not from 0 to count - 1.
    """

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        check_integer("count", count, minimum=1, error=ConfigError)
        check_integer("rank", rank, minimum=0, error=ConfigError)
        if rank >= count:
            raise ConfigError(f"rank must be 0 to {count - 1}, got {rank}; raise count")
        self.rank, self.count = rank, count
        self._device = torch.device("cpu")
        self._owns_group = False
        self._work: CollectiveWork | None = None

    @classmethod
    def of_launch(cls) -> Self:
        """Return the processes that torchrun started; only this one without torchrun."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(int(os.environ.get("RANK", "0")) if count > 1 else 0, count)

    @property
    def is_first(self) -> bool:
        """True on the process that writes files and shows progress."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Device of the tensors that the processes exchange."""
        return self._device

    def __enter__(self) -> Self:
        if self.count == 1:
            return self
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
            self._device = torch.accelerator.current_accelerator() or self._device
        if not dist.is_initialized():
            try:
                dist.init_process_group(dist.get_default_backend_for_device(self._device))
            except (dist.DistError, RuntimeError, ValueError) as error:
                reason = str(error).partition("\n")[0]
                raise ConfigError(
                    f"{self.count} processes must connect to each other, got {reason!r}; start them"
                    " with torchrun"
                ) from error
            self._owns_group = True
        self._work = CollectiveWork(self._device)
        return self

    def __exit__(
        self, error_type: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After Ctrl-C the other processes may be in any collective.
        if self._work is not None and (error is None or isinstance(error, Exception)):
            self._work.__exit__(error_type, error, trace)
        self._destroy_group()

    def leave(self) -> None:
        """Leave the group, so that the rest of the block runs alone. Collective."""
        self.synchronize()
        self._work = None
        self._destroy_group()

    def _destroy_group(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def synchronize(self) -> None:
        """Wait for all processes; raise if any process failed. Collective."""
        if self._work is not None:
            self._work.synchronize()

    def share(self, batches: Sequence[T]) -> Sequence[T]:
        """Return this process's batches: contiguous, so that rank order is batch order.

        Raises:
            ConfigError: there are fewer batches than processes.
        """
        if len(batches) < self.count:
            raise ConfigError(
                f"calibration needs at least one batch for each process, got {len(batches)} batches"
                f" for {self.count} processes; raise rows, or lower tuning.batch_size"
            )
        first, end = (len(batches) * rank // self.count for rank in (self.rank, self.rank + 1))
        return batches[first:end]

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the processes' tensors, added in the order of the ranks. Collective."""
        if self.count == 1:
            return tensor
        self.synchronize()
        total = tensor.contiguous()
        if self.rank:
            received = torch.empty_like(total)
            dist.recv(received, self.rank - 1)
            total = received.add_(total)
        if self.rank + 1 < self.count:
            dist.send(total, self.rank + 1)
        dist.broadcast(total, self.count - 1)
        return total

    def max(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum of the processes' tensors. Collective."""
        if self.count > 1:
            self.synchronize()
            tensor = tensor.contiguous().clone()
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def concatenate(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes, in the order of the ranks. Collective."""
        if self.count == 1:
            return rows
        self.synchronize()
        parts = []
        for source in range(self.count):
            length = torch.tensor(len(rows), device=self._device)
            dist.broadcast(length, source)
            part = rows.contiguous()
            if source != self.rank:
                part = rows.new_empty((int(length), *rows.shape[1:]))
            dist.broadcast(part, source)
            parts.append(part)
        return torch.cat(parts)

    def any(self, flag: bool) -> bool:
        """Return True on every process if `flag` is true on any process. Collective."""
        return bool(self.max(torch.tensor(int(flag), device=self._device)))

    @torch.no_grad()
    def copy_from_first(self, module: nn.Module) -> None:
        """Overwrite parameters and buffers with the first process's values. Collective."""
        if self.count > 1:
            self.synchronize()
            for tensor in module.state_dict().values():
                value = tensor.contiguous()
                dist.broadcast(value, 0)
                tensor.copy_(value)


ONE_PROCESS = DataRanks()


def check_ranks(ranks: object, *, by_loss: bool = False) -> None:
    """Check the argument `ranks` of a calibration method.

    Raises:
        ConfigError: it is not DataRanks, or by_loss is set with several processes: it samples the
            targets of all batches with one generator.
    """
    check_type("ranks", ranks, DataRanks, "DataRanks", error=ConfigError)
    if by_loss and isinstance(ranks, DataRanks) and ranks.count > 1:
        raise ConfigError(
            f"by_loss=true needs all batches in one process, got {ranks.count}; start one, or set"
            " by_loss to false"
        )
