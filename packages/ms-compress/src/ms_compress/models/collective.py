"""Collective work that ends on all processes when one of them fails."""

from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from ms_compress.errors import ExportError


class CollectiveWork:
    """Collective work as a `with` block; an error on one process ends it on all.

    Processes exchange errors at each `synchronize` and at the end of the block.

    Args:
        device: device for the exchange of tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_over = not dist.is_initialized() or dist.get_world_size() == 1

    def synchronize(self) -> None:
        """Wait for all processes; a collective call.

        Raises:
            ExportError: another process failed; the message has its reason.
        """
        self._exchange_errors(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exchange_errors(error)

    def _exchange_errors(self, error: BaseException | None) -> None:
        if self._is_over:
            return
        failed = torch.tensor(int(error is not None), device=self._device)
        # Usually a single number; the reasons are exchanged only after a failure.
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if not failed:
            return
        # All ranks raise now, so leaving the block must not wait for another exchange.
        self._is_over = True
        own_reason = None if error is None else str(error) or type(error).__name__
        reasons: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, own_reason)
        if error is None:
            rank, reason = next((r, text) for r, text in enumerate(reasons) if text is not None)
            raise ExportError(f"process {rank} failed, and so nothing is exported: {reason}")
