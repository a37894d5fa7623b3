"""Reads the samples of one dataset of text in a shuffled order, from any place in it."""

import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np

from ms_data.disk.format import Index
from ms_data.disk.split import Split
from ms_data.errors import SettingError
from ms_data.settings.arguments import check_counts
from ms_data.streams.batch import Batch
from ms_data.streams.order import Order
from ms_data.streams.window import Window

CACHE_MIB = 64
"""Decoded frames that a stream keeps, unless it is told otherwise."""
GOLDEN = (5**0.5 - 1) / 2
"""The fractional parts of its multiples are spread evenly, however many one takes."""
CHUNK_FRAMES = 4
"""Frames in a chunk: with about four, reading twice the one that two chunks share is cheap."""


class TokenSource:
    """The samples of a split in their order, epoch after epoch.

    Args:
        folder: a folder that `build` wrote.
        split: which part of it.
        length: tokens in a sample.
        seed: any integer.
        shuffle: False reads in the order on disk.
        chunk_samples: neighbouring samples that are read together; None takes about four frames.
        window_chunks: chunks that are shuffled together and held in memory.
        cache_mib: decoded frames that are kept.
        shared_cache: where they are kept for all processes of this machine; None for this one.
        rank: of this process among those that read the split.

    Raises:
        SettingError: an argument is out of range, or the split is too short for it.
        DamageError: the index, or later a frame, is not what was written.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        length: int,
        seed: int,
        shuffle: bool,
        chunk_samples: int | None,
        window_chunks: int,
        cache_mib: int = CACHE_MIB,
        shared_cache: str | Path | None = None,
        rank: int = 0,
    ) -> None:
        if cache_mib < 0:
            raise SettingError(f"cache_mib is {cache_mib}; give 0 or more MiB")
        self._split = Split(
            folder, split, cache_bytes=operator.index(cache_mib) << 20, shared_cache=shared_cache
        )
        self._turn = rank * GOLDEN % 1 if shared_cache is not None else 0.0
        self._length = length
        samples = self._split.tokens // length
        if not samples:
            raise SettingError(
                f"split {split!r} has {self._split.tokens} tokens, fewer than one sequence of "
                f"{length}; lower sequence_length or build from more text"
            )
        if chunk_samples is None:
            chunk_samples = -(-CHUNK_FRAMES * self._split.index.frame_tokens // length)
        check_counts(chunk_samples=chunk_samples, window_chunks=window_chunks)
        self.order = Order(
            samples=samples,
            seed=seed,
            chunk_samples=operator.index(chunk_samples),
            window_chunks=operator.index(window_chunks),
            shuffle=shuffle,
        )
        """Which sample is drawn when."""
        self._window: tuple[tuple[int, int], Window] | None = None

    @property
    def index(self) -> Index:
        """What the tokens mean."""
        return self._split.index

    def read(self, start: int, count: int) -> Batch:
        """Read `count` samples from draw number `start` on, counted over all epochs."""
        parts = []
        while count:
            rows = self._rows(start, count)
            got = len(rows["tokens"])
            parts.append(rows)
            start, count = start + got, count - got
        return parts[0] if len(parts) == 1 else _join(parts)

    def _rows(self, start: int, most: int) -> Batch:
        """Read up to `most` samples from `start`, ending with the window."""
        epoch, position = divmod(start, self.order.samples)
        number, offset = divmod(position, self.order.window_samples)
        key = (epoch, number)
        if self._window is None or self._window[0] != key:
            # Forgotten first: if reading fails, its memory holds neither window.
            old, self._window = self._window, None
            window = Window(
                self._split,
                self.order.window(epoch, number),
                length=self._length,
                chunk_samples=self.order.chunk_samples,
                reuse=old[1] if old else None,
                turn=self._turn,
            )
            self._window = (key, window)
        window = self._window[1]
        return window.rows(offset, min(offset + most, len(window)))


def _join(parts: list[Batch]) -> Batch:
    values: Iterable[Any] = zip(*(part.values() for part in parts), strict=True)
    joined: Any = dict(zip(parts[0], map(np.concatenate, values), strict=True))
    return cast(Batch, joined)
