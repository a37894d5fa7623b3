"""Streams conversations for training: mixed, packed, shared by processes, resumable exactly."""

import operator
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from ms_data.disk.samples import Samples
from ms_data.errors import DamageError, SettingError
from ms_data.media.processor import Processor
from ms_data.streams.batch import WeightedBatch, fill_rows
from ms_data.streams.draws import Draws
from ms_data.streams.media import PictureBatch, SoundBatch, media_batch
from ms_data.streams.mixed import MixedStream, Sources
from ms_data.streams.mixture import Weights
from ms_data.streams.packed_source import Long, PackedSource, Weighting
from ms_data.streams.packer import Row
from ms_data.streams.packing_rules import PACKING_RULES
from ms_data.streams.share import StreamPlace, count, truth

_CHOICES: dict[str, Collection[str]] = {
    "long": get_args(Long),
    "packing": PACKING_RULES,
    "weighting": get_args(Weighting),
}


class InstructionBatch(WeightedBatch, PictureBatch, SoundBatch):
    """A batch of packed conversations; b rows of S tokens.

    Those with pictures have what `PictureBatch` names, those with sound what `SoundBatch` does;
    in every batch, also in those that happen to hold none.
    """

    task: NDArray[np.int64]
    """Shape (b,): the number of the source; the documents of a row are of one source."""


class InstructionStream(MixedStream[InstructionBatch]):
    """Global batches of packed rows, of which each process receives its own.

    Samples are drawn from the sources as a `Mixture` says and packed source by source. Which
    samples lie in which row depends on the data, the seed and the settings alone: not on the
    number of processes, nor on the batch size.

    Args:
        sources: a folder that `build(..., chat=...)` wrote, or several, by name.
        sequence_length: tokens in a row, S.
        batch_size: rows in a global batch.
        seed: any integer; another seed is another order.
        place: has `rank` and `count`; see `TokenStream`.
        split: which part of the data, `train` or `held_out`.
        weights: how often samples of each source are drawn, by name or in their order, or
            `Phase`s; by default as many as each holds.
        max_epochs: how many times each source is read at most, by name; the others then share its
            weight, and the stream ends when none may give more.
        long: a sample longer than a row is cut off (`truncate`) or cut in parts (`split`).
        packing: which rule places samples in rows; a module of `packing_rules`.
        open_rows: rows packed at a time for each source; 0 gives each sample a row of its own.
        weighting: `token` counts each target alike, `sample` each sample.
        shuffle: False draws in the order of the corpus.
        epochs: stop after this many times the samples of all sources, rows that are not full
            then included; None never stops.

    Raises:
        SettingError: an argument is out of range, a source has nothing to learn, or two were
            built with different tokenizers.
        DamageError: bytes are not those that were written.
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
        long: Long = "truncate",
        packing: str = "best_fit",
        open_rows: int = 512,
        weighting: Weighting = "token",
        shuffle: bool = True,
        epochs: int | None = None,
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
        _check(open_rows, {"long": long, "packing": packing, "weighting": weighting})
        self._weighting: Weighting = weighting
        self._settings = {
            "sources": {},
            **self._settings,
            "long": long,
            "packing": packing,
            "open_rows": operator.index(open_rows),
        }
        self._name_sources(sources)
        self._sources = [self._open(number) for number in range(len(self.names))]
        self._mix(
            [source.samples.dataset_index for source in self._sources],
            [len(source.samples) for source in self._sources],
            weights=weights,
            epochs=epochs,
            max_epochs=max_epochs,
        )
        self._processor = _one_processor(self.names, self._sources)
        self._ready: deque[tuple[int, Row]] = deque()
        self._rows = self._tokens = 0
        self._flushed = False

    def _open(self, number: int) -> PackedSource:
        settings, length = self._settings, self.sequence_length
        samples = Samples(self.folders[number], settings["split"], kind="conversations")
        draws = Draws(len(samples), seed=self._source_seed(number), shuffle=settings["shuffle"])
        packer = PACKING_RULES[settings["packing"]](length, window=settings["open_rows"])
        return PackedSource(samples, draws, packer, length=length, long=settings["long"])

    @property
    def delivered_rows(self) -> int:
        """Rows with samples that all processes together have received."""
        return self._rows

    @property
    def fill(self) -> float:
        """The share of the delivered tokens that are of samples; the rest is padding."""
        return self._tokens / max(1, self._rows * self.sequence_length)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """For each source: samples `drawn`, `truncated` and `split`, segments `without_targets`."""
        return {
            name: dict(source.counters)
            for name, source in zip(self.names, self._sources, strict=True)
        }

    def __next__(self) -> InstructionBatch:
        while len(self._ready) < self.batch_size and not self._flushed:
            if self._end is not None and self._mixture.position >= self._end:
                for number, source in enumerate(self._sources):
                    self._ready.extend((number, row) for row in source.flush())
                self._flushed = True
            else:
                self._draw(self._mixture.draw())
        if not self._ready:
            raise StopIteration
        rows = [self._ready.popleft() for _ in range(min(self.batch_size, len(self._ready)))]
        return self._deliver(rows)

    def of_tasks(self, tasks: Sequence[int]) -> InstructionBatch:
        """Draw a global batch whose rows are of these sources, apart from the mixture.

        Args:
            tasks: the number of a source for each row of the global batch.

        Raises:
            SettingError: not one a row, or there is no such source.
        """
        if len(tasks) != self.batch_size or not all(0 <= one < len(self.names) for one in tasks):
            raise SettingError(
                f"tasks {list(tasks)}: give {self.batch_size} numbers below {len(self.names)}"
            )
        return self._deliver([self._next_of(task) for task in tasks])

    def _next_of(self, task: int) -> tuple[int, Row]:
        while True:
            for at, (source, row) in enumerate(self._ready):
                if source == task:
                    del self._ready[at]
                    return task, row
            self._draw(task)

    def _draw(self, source: int) -> None:
        self._ready.extend((source, row) for row in self._sources[source].draw())

    def _deliver(self, rows: list[tuple[int, Row]]) -> InstructionBatch:
        self._rows += len(rows)
        self._tokens += sum(stop - start for _, row in rows for _, start, stop in row)
        own = self._share.of(rows)
        task = np.zeros(self._share.rows, np.int64)
        task[: len(own)] = [source for source, _ in own]
        batch = fill_rows(
            [[self._sources[at].read(one, self._weighting) for one in row] for at, row in own],
            count=self._share.rows,
            width=self.sequence_length,
            end_of_text=self._sources[0].samples.dataset_index.end_of_text,
        )
        return {**batch, **self._media(own, batch["positions"]), "task": task}

    def _media(
        self, rows: Sequence[tuple[int, Row]], positions: NDArray[np.int64]
    ) -> InstructionBatch:
        """Make what pictures and sounds in these rows fill."""
        if self._processor is None:
            return cast(InstructionBatch, {})
        parts = [
            [(one.stop - one.start, self._sources[at].media(one)) for one in row]
            for at, row in rows
        ]
        try:
            found = media_batch(parts, self._processor, positions)
        except ValueError as error:
            folders = ", ".join(sorted({self.names[at] for at, _ in rows}))
            raise DamageError(self.folders[0], f"media of {folders}", str(error)) from error
        return cast(InstructionBatch, found)

    def _position(self) -> dict[str, Any]:
        return {
            **self._ledger(),
            "sources": [source.state() for source in self._sources],
            "ready": [[task, [list(one) for one in row]] for task, row in self._ready],
            "rows": self._rows,
            "tokens": self._tokens,
            "flushed": self._flushed,
        }

    def _go_to(self, position: Mapping[str, Any]) -> None:
        for source, one in zip(self._sources, position["sources"], strict=True):
            source.restore(one)
        self._ready = deque(
            (count(task), tuple(self._sources[task].segment(one) for one in row))
            for task, row in position["ready"]
        )
        self._rows, self._tokens = count(position["rows"]), count(position["tokens"])
        self._load_ledger(position)
        # A run that ended goes on where this stream has more epochs.
        reached = self._end is not None and self._mixture.position >= self._end
        self._flushed = truth(position["flushed"]) and reached


def _one_processor(names: Sequence[str], sources: Sequence[PackedSource]) -> Processor | None:
    """Return the processor of all sources that have pictures or sound.

    Raises:
        SettingError: two differ.
    """
    found = [(name, source.samples.processor) for name, source in zip(names, sources, strict=True)]
    held = [(name, one) for name, one in found if one is not None]
    for name, one in held:
        if one.settings != held[0][1].settings:
            raise SettingError(
                f"sources {held[0][0]!r} and {name!r} were built with different processors, so "
                "one model cannot read both; build both with one"
            )
    return held[0][1] if held else None


def _check(open_rows: int, choices: Mapping[str, str]) -> None:
    if open_rows < 0:
        raise SettingError(f"open_rows is {open_rows}; it must be 0 (no packing) or more")
    for name, value in choices.items():
        if value not in _CHOICES[name]:
            known = " or ".join(map(repr, _CHOICES[name]))
            raise SettingError(f"{name} is {value!r}; it must be {known}")
