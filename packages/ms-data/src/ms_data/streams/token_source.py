"""Reads fixed-length samples of one text dataset in shuffled order, from any position."""

import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np

from ms_data.arguments import shown
from ms_data.disk.format import Index
from ms_data.disk.remote import RemoteShards
from ms_data.disk.split import Split
from ms_data.errors import SettingError
from ms_data.settings.arguments import check_counts, is_integer
from ms_data.streams.batch import Batch
from ms_data.streams.order import Order
from ms_data.streams.window import Window

CACHE_MIB = 64
"""Default size of the cache of decoded frames."""
GOLDEN = (5**0.5 - 1) / 2
"""Golden ratio; the fractional parts of its multiples are evenly spread for any number of ranks."""
CHUNK_FRAMES = 4
"""Frames per chunk; with about four, decoding the frames at chunk borders twice is cheap."""


class TokenSource:
    """The samples of a split in delivery order, epoch after epoch.

    Args:
        folder: output folder of `build`.
        split: name of the split.
        length: tokens per sample.
        seed: any integer.
        shuffle: False reads in the order on disk.
        chunk_samples: neighboring samples that are read together; None: about four frames.
        window_chunks: chunks that are shuffled together and held in memory.
        cache_mib: size of the cache of decoded frames.
        shared_cache: folder of a frame cache for all processes of this machine; None: a cache in
            this process.
        rank: rank of this process among the readers of the split.

    Raises:
        SettingError: an argument is out of range, or the split is too short.
        DamageError: the index, or later a frame, is damaged.
    """

    def __init__(
        self,
        folder: Path | RemoteShards,
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
        if not is_integer(cache_mib) or cache_mib < 0:
            raise SettingError(f"cache_mib must be 0 or more, got {shown(cache_mib)}")
        self._split = Split(
            folder, split, cache_bytes=operator.index(cache_mib) << 20, shared_cache=shared_cache
        )
        # With a shared cache, ranks start at different chunks and decode different frames.
        self._start_fraction = rank * GOLDEN % 1 if shared_cache is not None else 0.0
        self._length = length
        samples = self._split.tokens // length
        if not samples:
            raise SettingError(
                f"split {split!r} has {self._split.tokens} tokens, fewer than one sequence of "
                f"{length}; lower sequence_length or build from more text"
            )
        if chunk_samples is None:
            # Rounded up.
            chunk_samples = -(-CHUNK_FRAMES * self._split.index.frame_tokens // length)
        check_counts(chunk_samples=chunk_samples, window_chunks=window_chunks)
        self.order = Order(
            samples=samples,
            seed=seed,
            chunk_samples=operator.index(chunk_samples),
            window_chunks=operator.index(window_chunks),
            shuffle=shuffle,
        )
        """Delivery order of the samples."""
        self._window: tuple[tuple[int, int], Window] | None = None

    @property
    def index(self) -> Index:
        """Index of the dataset."""
        return self._split.index

    def read(self, start: int, count: int) -> Batch:
        """Read `count` samples from draw number `start` on, counted over all epochs."""
        parts = []
        while count:
            rows = self._rows(start, count)
            rows_read = len(rows["tokens"])
            parts.append(rows)
            start, count = start + rows_read, count - rows_read
        return parts[0] if len(parts) == 1 else _concatenate(parts)

    def _rows(self, start: int, limit: int) -> Batch:
        """Read up to `limit` samples from `start`, at most to the end of the window."""
        epoch, position = divmod(start, self.order.samples)
        number, offset = divmod(position, self.order.window_samples)
        key = (epoch, number)
        if self._window is None or self._window[0] != key:
            # Drop it first: its buffer is reused, so after a failure it holds neither window.
            previous, self._window = self._window, None
            window = Window(
                self._split,
                self.order.window(epoch, number),
                length=self._length,
                chunk_samples=self.order.chunk_samples,
                reuse=previous[1] if previous else None,
                start_fraction=self._start_fraction,
            )
            self._window = (key, window)
        window = self._window[1]
        return window.rows(offset, min(offset + limit, len(window)))


def _concatenate(parts: list[Batch]) -> Batch:
    values: Iterable[Any] = zip(*(part.values() for part in parts), strict=True)
    joined: Any = dict(zip(parts[0], map(np.concatenate, values), strict=True))
    return cast(Batch, joined)
