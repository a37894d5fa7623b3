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
        turn: which part of the chunks is read before the ones that come first, from 0 to 1;
            processes that share decoded frames then each decode others.
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
        turn: float = 0.0,
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
        ends: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(chunks)
        begin = int(turn * len(chunks))
        for slot in (*range(begin, len(chunks)), *range(begin)):
            chunk = int(chunks[slot])
            first = chunk * chunk_samples * length
            found = split.read_into(self._buffer[slot, : split.tokens - first], first)
            # An end at the far edge belongs to the row's look-ahead token alone.
            ends[slot] = found[found < width] + slot * width
        self._ends = np.concatenate((*ends, [_NEVER]))

    def __len__(self) -> int:
        return len(self._starts)

    def rows(self, start: int, stop: int) -> Batch:
        """Make a batch of the samples at `start` to `stop` of the window's order."""
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

        positions = np.empty((count, length), np.int64)
        positions[:] = self._steps
        documents = np.zeros((count, length), np.int32)
        end = end[end % length != 0]
        if len(end):
            _restart(positions, documents, end)
        return Batch(tokens=tokens, targets=targets, positions=positions, documents=documents)

    def _gather(self, at: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """Gather the `length` + 1 tokens from each flat coordinate, shape (b, length + 1)."""
        step = self._buffer.itemsize
        starts = self._buffer.size - self._length
        view = as_strided(self._buffer, (starts, self._length + 1), (step, step), writeable=False)
        return view[at]


def _restart(
    positions: NDArray[np.int64], documents: NDArray[np.int32], ends: NDArray[np.int64]
) -> None:
    """Begin anew where a document ends within a row; most rows of long documents hold no end.

    Args:
        positions: shape (b, S), counting each row through.
        documents: shape (b, S), all 0.
        ends: increasing, counted along the flat batch.
    """
    length = positions.shape[1]
    rows, number = np.unique(ends // length, return_inverse=True)
    heads = np.arange(len(rows)) * length
    # Runs of one document, by where each starts in these rows laid end to end.
    runs = np.sort(np.concatenate((heads, number * length + ends % length)))
    lengths = np.diff(runs, append=len(rows) * length)
    first = np.searchsorted(runs, heads)
    nth = np.arange(len(runs)) - np.repeat(first, np.diff(first, append=len(runs)))
    shape = (len(rows), length)
    positions[rows] -= np.repeat(runs % length, lengths).reshape(shape)
    documents[rows] = np.repeat(nth.astype(np.int32), lengths).reshape(shape)
