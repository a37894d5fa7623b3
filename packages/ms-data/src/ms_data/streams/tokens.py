"""Streams text for training: shuffled, mixed, shared by processes and resumable by arithmetic."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from ms_data.errors import SettingError
from ms_data.files.untrusted import check_path
from ms_data.streams.batch import Batch
from ms_data.streams.mixed import MixedStream, Sources
from ms_data.streams.mixture import Weights
from ms_data.streams.share import StreamPlace, count
from ms_data.streams.token_source import CACHE_MIB, TokenSource


class TokenStream(MixedStream[Batch]):
    """Global batches of fixed-length samples, of which each process receives its rows.

    Sample i of an epoch covers tokens i·S to i·S + S of the split's documents laid end to end.
    The order depends on the data, the seed and the position alone: not on the number of
    processes, nor on the batch size. Epochs follow each other without a seam, and batches straddle
    them. Several sources are drawn from as a `Mixture` says, each in its own order and epochs; the
    batch then says by `task` which source a row is of.

    Args:
        sources: a folder that `build` wrote, or several, by name.
        sequence_length: tokens in a sample, S.
        batch_size: samples in a global batch.
        seed: any integer; another seed is another order.
        place: has `rank` and `count`; this reader gets rows `rank·b` to `(rank + 1)·b` of each
            global batch with b = batch_size / count, until `share_out` says otherwise. None reads
            whole batches.
        split: which part of each dataset, `train` or `held_out`.
        weights: how often samples of each source are drawn, by name or in their order, or
            `Phase`s; by default as many as each holds.
        max_epochs: how many times each source is read at most, by name; the others then share its
            weight, and the stream ends before the batch that none of them can fill.
        shuffle: False reads in the order on disk.
        epochs: stop before the batch that this many times all samples cannot fill; None never
            stops.
        chunk_samples: neighbouring samples that are read together; None takes about four frames.
        window_chunks: chunks of a source that are shuffled together and held in memory.
        cache_mib: decoded frames of each source that are kept, in MiB; 0 for the last one alone.
        shared_cache: a folder of this machine, best in memory, such as `/dev/shm`, where frames are
            kept for all processes that read a source, so that a machine decodes each once; in a
            file of `cache_mib`, which is removed as they end. None keeps them in each process.

    Raises:
        SettingError: an argument is out of range, a split is too short for it, or two sources
            were built with different tokenizers.
        DamageError: the index, or later a frame, is not what was written.
    """

    def __init__(
        self,
        sources: Sources,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int = 0,
        place: StreamPlace | None = None,
        split: str = "train",
        weights: Weights | None = None,
        max_epochs: Mapping[str, float] | None = None,
        shuffle: bool = True,
        epochs: int | None = None,
        chunk_samples: int | None = None,
        window_chunks: int = 64,
        cache_mib: int = CACHE_MIB,
        shared_cache: str | Path | None = None,
    ) -> None:
        if shared_cache is not None:
            check_path("shared_cache", shared_cache, error=SettingError)
        super().__init__(
            sequence_length=sequence_length,
            batch_size=batch_size,
            seed=seed,
            place=place,
            split=split,
            shuffle=shuffle,
            epochs=epochs,
        )
        self._mixed = not isinstance(sources, str | Path)
        if not self._mixed and (weights is not None or max_epochs is not None):
            raise SettingError("weights and max_epochs are for several sources; give them by name")
        self._name_sources(sources)
        cache = {"mib": cache_mib, "shared": shared_cache, "rank": self._share.rank}
        self._sources = [
            self._open(number, chunk_samples, window_chunks, cache)
            for number in range(len(self.names))
        ]
        self._mix(
            [source.index for source in self._sources],
            [source.order.samples for source in self._sources],
            weights=weights,
            epochs=epochs,
            max_epochs=max_epochs,
        )
        self._consumed = 0
        orders = [source.order for source in self._sources]
        chunks = [order.chunk_samples for order in orders]
        if not self._mixed:  # whatever the folder is called
            del self._settings["sources"]
            self._is_of_one_dataset()
        self._settings |= {
            "chunk_samples": chunks if self._mixed else chunks[0],
            "window_chunks": orders[0].window_chunks,
        }
        self._check_length(epochs)

    def _open(
        self, number: int, chunk_samples: int | None, window_chunks: int, cache: Mapping[str, Any]
    ) -> TokenSource:
        settings = self._settings
        return TokenSource(
            self.folders[number],
            settings["split"],
            length=self.sequence_length,
            seed=self._source_seed(number) if self._mixed else settings["seed"],
            shuffle=settings["shuffle"],
            chunk_samples=chunk_samples,
            window_chunks=window_chunks,
            cache_mib=cache["mib"],
            shared_cache=cache["shared"],
            rank=cache["rank"],
        )

    def _check_length(self, epochs: int | None) -> None:
        if self._end is not None and self._end < self.batch_size:
            raise SettingError(
                f"split {self._settings['split']!r} has {self.samples_per_epoch} sequences of "
                f"{self.sequence_length} tokens, which in {epochs or 'their'} epochs do not fill "
                f"one batch of {self.batch_size}; lower batch_size or sequence_length"
            )

    @property
    def batches_per_epoch(self) -> int:
        """Whole global batches in one epoch."""
        return self.samples_per_epoch // self.batch_size

    @property
    def consumed_samples(self) -> int:
        """Samples that all processes together have received."""
        return self._mixture.position if self._mixed else self._consumed

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0; of all sources together."""
        return self.consumed_samples // self.samples_per_epoch

    def __next__(self) -> Batch:
        if self._end is not None and self.consumed_samples + self.batch_size > self._end:
            raise StopIteration
        share = self._share
        if not self._mixed:
            batch = self._sources[0].read(self._consumed + share.first, share.rows)
            self._consumed += self.batch_size
            return batch
        before = self._mixture.counts
        try:
            return self._draw(list(before.values()))
        except BaseException:
            self._mixture.step_back(before)
            raise

    def _draw(self, drawn: list[int]) -> Batch:
        """Draw a global batch, given the counts before it, and read this process's rows."""
        tasks = np.array([self._mixture.draw() for _ in range(self.batch_size)])
        first = self._share.first
        own = tasks[first : first + self._share.rows]
        batch: dict[str, Any] = {}
        for number, source in enumerate(self._sources):
            rows = np.flatnonzero(own == number)
            if not len(rows):
                continue
            start = drawn[number] + int(np.count_nonzero(tasks[:first] == number))
            part = source.read(start, len(rows))
            for name, values in part.items():
                if name not in batch:
                    shape = (len(own), self.sequence_length)
                    batch[name] = np.empty(shape, values.dtype)  # type: ignore[attr-defined]
                batch[name][rows] = values
        return cast(Batch, {**batch, "task": own})

    def _position(self) -> dict[str, Any]:
        return self._ledger() if self._mixed else {"consumed_samples": self._consumed}

    def _go_to(self, position: Mapping[str, Any]) -> None:
        if self._mixed:
            self._load_ledger(position)
        else:
            self._consumed = count(position["consumed_samples"])
