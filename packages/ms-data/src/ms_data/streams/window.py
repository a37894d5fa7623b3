"""Samples of one shuffle window, decoded once and cut into batches."""

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ms_data.disk.split import Split
from ms_data.streams.batch import IGNORED, Batch

_NEVER = 1 << 62


class Window:
    """Tokens and document ends of the samples of a window, in memory.

    All tokens are in one buffer with one row per chunk; flat coordinates index that buffer.

    Args:
        split: source of the tokens.
        samples: int64, shape (w,): samples in delivery order.
        length: tokens per sample.
        chunk_samples: neighboring samples that are read together.
        reuse: a window that is no longer needed, whose buffer is reused.
        start_fraction: position in the list of chunks, from 0 to 1, at which reading starts, so
            that processes with a shared frame cache decode different frames.
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
        start_fraction: float = 0.0,
    ) -> None:
        # (c,) distinct chunks, (w,) row of each sample
        chunks, slots = np.unique(samples // chunk_samples, return_inverse=True)
        width = chunk_samples * length + 1  # one token more, the target of the last position
        self._length = length
        self._steps = np.arange(length)
        shape = (len(chunks), width)
        # A window can take hundreds of MB; the old buffer is reused where possible.
        if reuse is not None and reuse._buffer.shape == shape:
            self._buffer = reuse._buffer
        else:
            self._buffer = np.empty(shape, split.index.token_type)
        self._starts = slots * width + (samples % chunk_samples) * length  # (w,) flat coordinates
        ends: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(chunks)
        spans = (int(chunk) * chunk_samples * length for chunk in chunks)
        split.prefetch((first, min(first + width, split.tokens)) for first in spans)
        begin = int(start_fraction * len(chunks))
        for slot in (*range(begin, len(chunks)), *range(begin)):
            chunk = int(chunks[slot])
            first = chunk * chunk_samples * length
            doc_ends = split.read_into(self._buffer[slot, : split.tokens - first], first)
            # An end at the right edge belongs to the next chunk; only its token is read here.
            ends[slot] = doc_ends[doc_ends < width] + slot * width
        # sentinel: searchsorted results stay valid indices
        self._ends = np.concatenate((*ends, [_NEVER]))

    def __len__(self) -> int:
        return len(self._starts)

    def rows(self, start: int, stop: int) -> Batch:
        """Return the samples `start` to `stop` of the window as a batch."""
        length, count = self._length, stop - start
        starts = self._starts[start:stop]
        gathered = self._gather(starts)  # (b, S + 1)
        tokens = gathered[:, :-1].astype(np.int64)
        targets = gathered[:, 1:].astype(np.int64)

        # Document ends in each row: `low` is the first, `inside` the number of them.
        low = np.searchsorted(self._ends, starts, side="right")
        ends_per_row = np.searchsorted(self._ends, starts + length, side="right") - low
        row = np.repeat(np.arange(count), ends_per_row)  # (e,) row of each document end
        index_in_row = np.arange(len(row)) - np.repeat(
            np.cumsum(ends_per_row) - ends_per_row, ends_per_row
        )
        end = (
            row * length + self._ends[low[row] + index_in_row] - starts[row]
        )  # in the flattened batch
        # the token after a document end belongs to another document
        targets.reshape(-1)[end - 1] = IGNORED

        positions = np.empty((count, length), np.int64)
        positions[:] = self._steps
        documents = np.zeros((count, length), np.int32)
        end = end[end % length != 0]  # an end at the row's edge needs no restart
        if len(end):
            _restart_documents(positions, documents, end)
        return Batch(tokens=tokens, targets=targets, positions=positions, documents=documents)

    def _gather(self, coordinates: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """Gather `length` + 1 tokens from every flat coordinate, shape (b, length + 1)."""
        itemsize = self._buffer.itemsize
        starts = self._buffer.size - self._length
        view = as_strided(
            self._buffer, (starts, self._length + 1), (itemsize, itemsize), writeable=False
        )
        return view[coordinates]


def _restart_documents(
    positions: NDArray[np.int64], documents: NDArray[np.int32], ends: NDArray[np.int64]
) -> None:
    """Restart positions and count documents after document ends inside a row.

    Only rows that contain an end are touched; most rows of long documents contain none.

    Args:
        positions: shape (b, S), initially 0 to S - 1 in every row.
        documents: shape (b, S), initially 0.
        ends: increasing flat indices into the batch.
    """
    length = positions.shape[1]
    rows, number = np.unique(ends // length, return_inverse=True)
    row_starts = np.arange(len(rows)) * length
    # Start of every run of one document, in these rows laid end to end.
    runs = np.sort(np.concatenate((row_starts, number * length + ends % length)))
    lengths = np.diff(runs, append=len(rows) * length)  # tokens of each run
    first = np.searchsorted(runs, row_starts)
    document = np.arange(len(runs)) - np.repeat(first, np.diff(first, append=len(runs)))
    shape = (len(rows), length)
    # subtract the start of the run
    positions[rows] -= np.repeat(runs % length, lengths).reshape(shape)
    documents[rows] = np.repeat(document.astype(np.int32), lengths).reshape(shape)
