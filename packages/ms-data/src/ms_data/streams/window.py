"""Holds the samples of one shuffle window, decoded once, and cuts them into batches."""

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ms_data.disk.split import Split
from ms_data.streams.batch import IGNORED, Batch

_NEVER = 1 << 62


class Window:
    """Tokens and document ends of some samples, in memory, in a given order.

    Tokens lie in one buffer, a row a chunk; flat coordinates count along that buffer.

    Args:
        split: where the tokens come from.
        samples: int64, shape (w,): the samples in their order of delivery.
        length: tokens in a sample.
        chunk_samples: neighbouring samples that are read in one go.
        reuse: a window that is no longer needed, whose memory is used again.
    """

    _buffer: NDArray[np.unsignedinteger]

    def __init__(
        self,
        split: Split,
        samples: NDArray[np.int64],
        *,
        length: int,
        chunk_samples: int,
        reuse: "Window | None" = None,
    ) -> None:
        chunks, slots = np.unique(samples // chunk_samples, return_inverse=True)
        width = chunk_samples * length + 1
        self._length = length
        self._steps = np.arange(length)
        shape = (len(chunks), width)
        if reuse is not None and reuse._buffer.shape == shape:
            self._buffer = reuse._buffer
        else:
            self._buffer = np.empty(shape, split.index.token_type)
        self._starts = slots * width + (samples % chunk_samples) * length
        ends: list[NDArray[np.int64]] = []
        for slot, chunk in enumerate(chunks.tolist()):
            first = chunk * chunk_samples * length
            found = split.read_into(self._buffer[slot, : split.tokens - first], first)
            # An end at the far edge belongs to the row's look-ahead token alone.
            ends.append(found[found < width] + slot * width)
        self._ends = np.concatenate((*ends, [_NEVER]))

    def __len__(self) -> int:
        return len(self._starts)

    def rows(self, start: int, stop: int) -> Batch:
        """Makes a batch of the samples at `start` to `stop` of the window's order."""
        length, count = self._length, stop - start
        at = self._starts[start:stop]
        taken = self._gather(at)
        tokens = taken[:, :-1].astype(np.int64)
        targets = taken[:, 1:].astype(np.int64)

        low = np.searchsorted(self._ends, at, side="right")
        inside = np.searchsorted(self._ends, at + length, side="right") - low
        row = np.repeat(np.arange(count), inside)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(inside) - inside, inside)
        end = row * length + self._ends[low[row] + nth] - at[row]
        targets.reshape(-1)[end - 1] = IGNORED

        # Runs of one document, by where each starts in the batch.
        heads = np.arange(count) * length
        runs = np.sort(np.concatenate((heads, end[end % length != 0])))
        lengths = np.diff(runs, append=count * length)
        first = np.searchsorted(runs, heads)
        nth_in_row = np.arange(len(runs)) - np.repeat(first, np.diff(first, append=len(runs)))
        positions = np.repeat(runs % length, lengths).reshape(count, length)
        np.subtract(self._steps, positions, out=positions)
        documents = np.repeat(nth_in_row.astype(np.int32), lengths).reshape(count, length)
        return Batch(tokens=tokens, targets=targets, positions=positions, documents=documents)

    def _gather(self, at: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """Gathers the `length` + 1 tokens from each flat coordinate, shape (b, length + 1)."""
        step = self._buffer.itemsize
        starts = self._buffer.size - self._length
        view = as_strided(self._buffer, (starts, self._length + 1), (step, step), writeable=False)
        return view[at]
