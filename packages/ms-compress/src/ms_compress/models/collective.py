"""Work of several processes: where one of them fails, none of the others waits for it."""

from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from ms_compress.errors import ExportError


class CollectiveWork:
    """Work of all processes as a `with` block, which an error in one of them ends in all.

    They meet at each `synchronise` and at the block's end; a process that fails tells the others
    there.

    Args:
        device: on which processes exchange tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_over = not dist.is_initialized() or dist.get_world_size() == 1

    def synchronise(self) -> None:
        """Wait for all processes, which must call it alike.

        Raises:
            ExportError: another process failed; gives its reason.
        """
        self._meet(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._meet(error)

    def _meet(self, error: BaseException | None) -> None:
        if self._is_over:
            return
        failed = torch.tensor(int(error is not None), device=self._device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if not failed:
            return
        self._is_over = True
        own = None if error is None else str(error) or type(error).__name__
        reasons: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, own)
        if error is None:
            rank, reason = next((r, text) for r, text in enumerate(reasons) if text is not None)
            raise ExportError(f"process {rank} failed, and so nothing is exported: {reason}")
