"""Streams text for training: shuffled, mixed, split among ranks, with exact resume."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from ms_data.disk.remote import RemoteShards
from ms_data.errors import SettingError
from ms_data.files.untrusted import check_path
from ms_data.streams.batch import Batch
from ms_data.streams.mixed import MixedStream, Sources
from ms_data.streams.mixture import Weights
from ms_data.streams.share import StreamPlace, read_count
from ms_data.streams.token_source import CACHE_MIB, TokenSource


class TokenStream(MixedStream[Batch]):
    """Global batches of fixed-length samples, from which every process receives its rows.

    Sample i of an epoch covers tokens i·S to i·S + S of the split's documents, laid end to end. The
    order depends only on the data, the seed and the position, not on the number of processes or the
    batch size. Epochs follow each other without a gap, and batches may span two epochs. Several
    sources are drawn from by a `Mixture`, each with its own order and epochs; `task` in the batch
    then holds the source index of every row.

    Args:
        sources: a folder that `build` wrote, or several by name. A URL such as `s3://bucket/shards`
            or `RemoteShards` reads from an object store.
        sequence_length: tokens per sample, S.
        batch_size: samples per global batch.
        seed: random seed of the order.
        place: object with `rank` and `count`. This process receives rows `rank·b` to `(rank + 1)·b`
            of every global batch, where b = batch_size / count, unless `share_out` changes this.
            None: all rows.
        split: `train` or `held_out`.
        weights: sampling weights of the sources, by name or in order, or `Phase`s. Default:
            proportional to the number of samples.
        max_epochs: maximum number of passes over each source, by name. A source that reaches it
            passes its weight to the others; the stream ends before the batch that they cannot fill.
        shuffle: False reads in the order on disk.
        epochs: stop before the batch that this number of passes over all samples cannot fill. None:
            never stop.
        chunk_samples: neighboring samples that are read together; None: about four frames.
        window_chunks: chunks per source that are shuffled together and held in memory.
        cache_mib: size of the cache of decoded frames per source, in MiB; 0 keeps only the last
            frame.
        shared_cache: folder for a frame cache that all processes of this machine share, ideally in
            memory, such as `/dev/shm`, so that every frame is decoded once per machine. The file
            has `cache_mib` MiB and is removed at the end. None: a cache per process.

    Raises:
        SettingError: an argument is out of range, a split is too short, or two sources have
            different tokenizers.
        DamageError: the index, or later a frame, is damaged.
    """

    _reads_remote = True

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
        self._mixed = not isinstance(sources, str | Path | RemoteShards)
        if not self._mixed and (weights is not None or max_epochs is not None):
            raise SettingError("weights and max_epochs need named sources; pass sources as a dict")
        self._name_sources(sources)
        cache = {"mib": cache_mib, "shared": shared_cache, "rank": self._rank_rows.rank}
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
        if not self._mixed:  # the folder may be renamed before a resume
            del self._settings["sources"]
            self._identify_by_fingerprint()
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
                f"{self.sequence_length} tokens, too few to fill one batch of {self.batch_size} "
                f"in {epochs or 'their'} epochs; lower batch_size or sequence_length"
            )

    @property
    def batches_per_epoch(self) -> int:
        """Complete global batches per epoch."""
        return self.samples_per_epoch // self.batch_size

    @property
    def consumed_samples(self) -> int:
        """Samples delivered to all processes so far."""
        return self._mixture.position if self._mixed else self._consumed

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0, over all sources together."""
        return self.consumed_samples // self.samples_per_epoch

    def __next__(self) -> Batch:
        if self._end is not None and self.consumed_samples + self.batch_size > self._end:
            raise StopIteration
        rank_rows = self._rank_rows
        if not self._mixed:
            batch = self._sources[0].read(self._consumed + rank_rows.first, rank_rows.rows)
            self._consumed += self.batch_size
            return batch
        # Drawing advances the mixture before the rows are read; undo it if reading fails.
        counts = self._mixture.counts
        try:
            return self._draw(list(counts.values()))
        except BaseException:
            self._mixture.step_back(counts)
            raise

    def _draw(self, counts_before: list[int]) -> Batch:
        """Draw a global batch and read this process's rows; `counts_before` precedes the draw."""
        tasks = np.array([self._mixture.draw() for _ in range(self.batch_size)])
        first = self._rank_rows.first
        local_tasks = tasks[first : first + self._rank_rows.rows]
        batch: dict[str, Any] = {}
        for number, source in enumerate(self._sources):
            rows = np.flatnonzero(local_tasks == number)
            if not len(rows):
                continue
            # Rows of lower ranks come first in the source's order.
            start = counts_before[number] + int(np.count_nonzero(tasks[:first] == number))
            part = source.read(start, len(rows))
            for name, values in part.items():
                if name not in batch:
                    shape = (len(local_tasks), self.sequence_length)
                    batch[name] = np.empty(shape, values.dtype)  # type: ignore[attr-defined]
                batch[name][rows] = values
        return cast(Batch, {**batch, "task": local_tasks})

    def _position(self) -> dict[str, Any]:
        return self._mixture_state() if self._mixed else {"consumed_samples": self._consumed}

    def _restore_position(self, position: Mapping[str, Any]) -> None:
        if self._mixed:
            self._load_mixture_state(position)
        else:
            self._consumed = read_count(position["consumed_samples"])
