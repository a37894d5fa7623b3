"""Reads the next batches in a thread while a step computes."""

import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from queue import SimpleQueue
from typing import Any

import torch
from attrs import frozen

from ms_parallel.training.checkpoints import Stream

DEPTH = 2
"""Number of batches to read ahead: one ready, and one in progress while a step uses the first."""


@frozen(kw_only=True)
class _Item:
    """A batch, or the error that ended the reader."""

    batch: Mapping[str, Any]
    state: dict[str, Any]
    """The stream's state after this batch."""
    error: BaseException | None = None


@frozen(kw_only=True)
class _Reader:
    """A running thread and the batches it has read."""

    items: "SimpleQueue[_Item]"
    slots: threading.Semaphore
    """Number of batches that the thread may still read."""
    stopped: threading.Event
    thread: threading.Thread


class ReadAhead:
    """Stream that reads the next batches in a thread; implements `Stream`.

    Batches come in the stream's order. `state_dict` is the position after the last batch that was
    returned, not read, so a run resumes exactly. Errors are raised at the same batch as without
    reading ahead.

    Args:
        stream: stream to read; must not be used elsewhere.
        pin: return tensors in pinned memory, which a device can copy while it computes.
        depth: maximum number of batches to read ahead.
    """

    def __init__(self, stream: Stream, *, pin: bool, depth: int = DEPTH) -> None:
        self.stream, self._pin, self._depth = stream, pin, depth
        # Copies, as a stream may return its live state.
        self._state = deepcopy(stream.state_dict())
        self._reader: _Reader | None = None

    def __next__(self) -> Mapping[str, Any]:
        """Return the next batch; wait if it has not been read."""
        # Started by the first batch, so that a stream can be restored before.
        reader = self._reader = self._reader or self._start()
        item = reader.items.get()
        if item.error is not None:
            # Back to the position before the failed batch.
            self.close()
            raise item.error
        reader.slots.release()
        self._state = item.state
        return item.batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was returned."""
        return deepcopy(self._state)

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore a position; batches that were read ahead are dropped."""
        self.close()
        self.stream.load_state_dict(state)
        self._state = deepcopy(self.stream.state_dict())

    def share_out(self, shares: Sequence[int], /) -> None:
        """Set the rows of each data rank; batches that were read ahead are read again."""
        self.close()
        self.stream.share_out(shares)

    def close(self) -> None:
        """Stop the thread and return the stream to the position of `state_dict`."""
        reader, self._reader = self._reader, None
        if reader is None:
            return
        # Release a slot, as the thread may be waiting for one; it then sees `stopped`.
        reader.stopped.set()
        reader.slots.release()
        reader.thread.join()
        self.stream.load_state_dict(self._state)

    def _start(self) -> _Reader:
        items = SimpleQueue[_Item]()
        slots, stopped = threading.Semaphore(self._depth), threading.Event()
        thread = threading.Thread(
            target=self._read, args=(items, slots, stopped), name="read-ahead", daemon=True
        )
        thread.start()
        return _Reader(items=items, slots=slots, stopped=stopped, thread=thread)

    def _read(
        self, items: "SimpleQueue[_Item]", slots: threading.Semaphore, stopped: threading.Event
    ) -> None:
        """Read batches until stopped or an error; runs in the thread."""
        while True:
            slots.acquire()
            if stopped.is_set():
                return
            try:
                batch = next(self.stream)
                batch = pinned(batch) if self._pin else batch
                # The state is copied here, as the stream moves on before the batch is used.
                items.put(_Item(batch=batch, state=deepcopy(self.stream.state_dict())))
            except BaseException as error:  # raised by `__next__`, after the batches before it
                items.put(_Item(batch={}, state={}, error=error))
                return


def pinned(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copy a batch of arrays or CPU tensors to pinned memory."""
    return {name: torch.as_tensor(value).pin_memory() for name, value in batch.items()}
