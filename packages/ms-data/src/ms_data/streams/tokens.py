"""Streams text for training: shuffled, shared by processes and resumable by arithmetic."""

import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from ms_data.disk.split import Split
from ms_data.errors import SettingError
from ms_data.streams.batch import Batch
from ms_data.streams.order import Order
from ms_data.streams.share import BatchStream, StreamPlace, at_least_one, count
from ms_data.streams.window import Window

CHUNK_FRAMES = 4
"""A chunk of about four frames makes reading the one it shares with its neighbour cheap."""


class TokenStream(BatchStream[Batch]):
    """Global batches of fixed-length samples, of which each process receives its rows.

    Sample i of an epoch covers tokens i·S to i·S + S of the split's documents laid end to end.
    The order depends on the data, the seed and the position alone: not on the number of
    processes, nor on the batch size. Epochs follow each other without a seam, and batches straddle
    them.

    Args:
        folder: a folder that `build` wrote.
        sequence_length: tokens in a sample, S.
        batch_size: samples in a global batch.
        seed: any integer; another seed is another order.
        place: has `rank` and `count`; this reader gets rows `rank·b` to `(rank + 1)·b` of each
            global batch with b = batch_size / count. None reads whole batches.
        split: which part of the dataset, `train` or `held_out`.
        shuffle: False reads in the order on disk.
        epochs: stop before the batch that this many epochs cannot fill; None never stops.
        chunk_samples: neighbouring samples that are read together; None takes about four frames.
        window_chunks: chunks that are shuffled together and held in memory.

    Raises:
        SettingError: an argument is out of range, or the split is too short for it.
        DamageError: the index, or later a frame, is not what was written.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int = 0,
        place: StreamPlace | None = None,
        split: str = "train",
        shuffle: bool = True,
        epochs: int | None = None,
        chunk_samples: int | None = None,
        window_chunks: int = 64,
    ) -> None:
        super().__init__(
            sequence_length=sequence_length,
            batch_size=batch_size,
            seed=seed,
            place=place,
            split=split,
            shuffle=shuffle,
            epochs=epochs,
        )
        self._split = Split(folder, split)
        samples = self._split.tokens // sequence_length
        if not samples:
            raise SettingError(
                f"split {split!r} has {self._split.tokens} tokens, fewer than one sequence of "
                f"{sequence_length}; lower sequence_length or build from more text"
            )
        if chunk_samples is None:
            chunk_samples = -(-CHUNK_FRAMES * self._split.index.frame_tokens // sequence_length)
        at_least_one(chunk_samples=chunk_samples, window_chunks=window_chunks)
        self._order = Order(
            samples=samples,
            seed=self._settings["seed"],
            chunk_samples=operator.index(chunk_samples),
            window_chunks=operator.index(window_chunks),
            shuffle=self._settings["shuffle"],
        )
        self._last = None if epochs is None else epochs * samples
        if self._last is not None and self._last < self.batch_size:
            raise SettingError(
                f"split {split!r} has {samples} sequences of {sequence_length} tokens, which in "
                f"{epochs} epochs do not fill one batch of {batch_size}; lower batch_size or "
                "sequence_length"
            )
        self._settings = {
            "dataset": self.fingerprint,
            **self._settings,
            "chunk_samples": self._order.chunk_samples,
            "window_chunks": self._order.window_chunks,
        }
        self._consumed = 0
        self._window: tuple[tuple[int, int], Window] | None = None

    @property
    def samples_per_epoch(self) -> int:
        """Samples of one epoch, over all processes."""
        return self._order.samples

    @property
    def batches_per_epoch(self) -> int:
        """Whole global batches in one epoch."""
        return self._order.samples // self.batch_size

    @property
    def vocabulary_size(self) -> int:
        """Every token is below it."""
        return self._split.index.vocabulary_size

    @property
    def fingerprint(self) -> str:
        """Names the dataset by its content."""
        return self._split.index.fingerprint

    @property
    def consumed_samples(self) -> int:
        """Samples that all processes together have received."""
        return self._consumed

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self._consumed // self._order.samples

    def __next__(self) -> Batch:
        if self._last is not None and self._consumed + self.batch_size > self._last:
            raise StopIteration
        share = self._share.rows
        start = self._consumed + self._share.rank * share
        parts = []
        while share:
            rows = self._rows(start, share)
            got = len(rows["tokens"])
            parts.append(rows)
            start, share = start + got, share - got
        self._consumed += self.batch_size
        return parts[0] if len(parts) == 1 else _join(parts)

    def _rows(self, start: int, most: int) -> Batch:
        """Reads up to `most` samples from global position `start`, ending with the window."""
        epoch, position = divmod(start, self._order.samples)
        number, offset = divmod(position, self._order.window_samples)
        key = (epoch, number)
        if self._window is None or self._window[0] != key:
            # Forgotten first: if reading fails, its memory holds neither window.
            old, self._window = self._window, None
            window = Window(
                self._split,
                self._order.window(epoch, number),
                length=self.sequence_length,
                chunk_samples=self._order.chunk_samples,
                reuse=old[1] if old else None,
            )
            self._window = (key, window)
        window = self._window[1]
        return window.rows(offset, min(offset + most, len(window)))

    def _position(self) -> dict[str, Any]:
        return {"consumed_samples": self._consumed}

    def _go_to(self, position: Mapping[str, Any]) -> None:
        self._consumed = count(position["consumed_samples"])


def _join(parts: list[Batch]) -> Batch:
    values: Iterable[Any] = zip(*(part.values() for part in parts), strict=True)
    joined: Any = dict(zip(parts[0], map(np.concatenate, values), strict=True))
    return cast(Batch, joined)
