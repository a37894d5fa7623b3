"""Streams conversations for training: mixed, packed, split among ranks, with exact resume."""

import operator
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from ms_data.arguments import shown
from ms_data.disk.samples import Samples
from ms_data.errors import DamageError, SettingError
from ms_data.media.processor import Processor
from ms_data.settings.arguments import is_integer
from ms_data.streams.batch import WeightedBatch, fill_rows
from ms_data.streams.draws import DrawSequence
from ms_data.streams.media import AudioBatch, ImageBatch, VideoBatch, media_batch
from ms_data.streams.mixed import MixedStream, Sources
from ms_data.streams.mixture import Weights
from ms_data.streams.packed_source import LongMode, PackedSource, Weighting
from ms_data.streams.packer import Row
from ms_data.streams.packing_rules import PACKING_RULES
from ms_data.streams.share import StreamPlace, read_bool, read_count

_CHOICES: dict[str, Collection[str]] = {
    "long": get_args(LongMode),
    "packing": PACKING_RULES,
    "weighting": get_args(Weighting),
}


class InstructionBatch(WeightedBatch, ImageBatch, VideoBatch, AudioBatch):
    """A batch of packed conversations: b rows of S tokens.

    Every batch has the keys of `ImageBatch`, `VideoBatch` and `AudioBatch` that the dataset's
    processor supports, also a batch without images, video or audio.
    """

    task: NDArray[np.int64]
    """Shape (b,): index of the source; all documents of a row come from one source."""


class InstructionStream(MixedStream[InstructionBatch]):
    """Global batches of packed rows, from which every process receives its rows.

    Samples are drawn from the sources by a `Mixture` and packed per source. The assignment of
    samples to rows depends only on the data, the seed and the settings, not on the number of
    processes or the batch size.

    Args:
        sources: a folder that `build(..., chat=...)` wrote, or several by name.
        sequence_length: tokens per row, S.
        batch_size: rows per global batch.
        seed: random seed of the order.
        place: object with `rank` and `count`; see `TokenStream`.
        split: `train` or `held_out`.
        weights: sampling weights of the sources, by name or in order, or `Phase`s. Default:
            proportional to the number of samples.
        max_epochs: maximum number of passes over each source, by name. A source that reaches it
            passes its weight to the others; the stream ends when all have reached it.
        long: for samples longer than a row, `truncate` cuts them off and `split` cuts them into
            parts.
        packing: name of a packing rule, a module of `packing_rules`.
        open_rows: rows packed at a time for each source; 0 gives every sample its own row.
        weighting: `token` weights all targets equally, `sample` all samples.
        shuffle: False keeps the order of the corpus.
        epochs: stop after this number of passes over all sources, including partly filled rows.
            None: never stop.

    Raises:
        SettingError: an argument is out of range, a source has no targets, or two sources have
            different tokenizers.
        DamageError: data on disk is damaged.
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
        long: LongMode = "truncate",
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
        # Settings that determine the rows. Batch size and number of processes may change on resume.
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
        self._processor = _common_processor(self.names, self._sources)
        self._ready_rows: deque[tuple[int, Row]] = deque()
        self._rows = self._tokens = 0
        self._flushed = False

    def _open(self, number: int) -> PackedSource:
        settings, length = self._settings, self.sequence_length
        samples = Samples(self.folders[number], settings["split"], kind="conversations")
        draws = DrawSequence(
            len(samples), seed=self._source_seed(number), shuffle=settings["shuffle"]
        )
        packer = PACKING_RULES[settings["packing"]](length, window=settings["open_rows"])
        return PackedSource(samples, draws, packer, length=length, long=settings["long"])

    @property
    def delivered_rows(self) -> int:
        """Rows with samples delivered to all processes so far."""
        return self._rows

    @property
    def fill(self) -> float:
        """Fraction of delivered tokens that are not padding."""
        return self._tokens / max(1, self._rows * self.sequence_length)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Per source: samples `drawn`, `truncated` and `split`, and segments `without_targets`."""
        return {
            name: dict(source.counters)
            for name, source in zip(self.names, self._sources, strict=True)
        }

    def __next__(self) -> InstructionBatch:
        # All ranks draw and pack everything, but read only their rows from disk.
        while len(self._ready_rows) < self.batch_size and not self._flushed:
            if self._end is not None and self._mixture.position >= self._end:
                # All samples are drawn: deliver the rows that still have space.
                for number, source in enumerate(self._sources):
                    self._ready_rows.extend((number, row) for row in source.flush())
                self._flushed = True
            else:
                self._draw(self._mixture.draw())
        if not self._ready_rows:
            raise StopIteration
        rows = [
            self._ready_rows.popleft() for _ in range(min(self.batch_size, len(self._ready_rows)))
        ]
        return self._deliver(rows)

    def of_tasks(self, tasks: Sequence[int]) -> InstructionBatch:
        """Draw a global batch with the given sources, outside the mixture.

        Args:
            tasks: source index for every row of the global batch.

        Raises:
            SettingError: the number of tasks is not the batch size, or a source does not exist.
        """
        if len(tasks) != self.batch_size or not all(0 <= task < len(self.names) for task in tasks):
            raise SettingError(
                f"tasks must be {self.batch_size} numbers below {len(self.names)}, "
                f"got {list(tasks)}"
            )
        return self._deliver([self._next_row(task) for task in tasks])

    def _next_row(self, task: int) -> tuple[int, Row]:
        while True:
            for index, (source, row) in enumerate(self._ready_rows):
                if source == task:
                    del self._ready_rows[index]
                    return task, row
            self._draw(task)

    def _draw(self, source: int) -> None:
        self._ready_rows.extend((source, row) for row in self._sources[source].draw())

    def _deliver(self, rows: list[tuple[int, Row]]) -> InstructionBatch:
        self._rows += len(rows)
        self._tokens += sum(stop - start for _, row in rows for _, start, stop in row)
        local_rows = self._rank_rows.of(rows)
        # The last batch may be short; its padding rows have no targets, and task 0.
        task = np.zeros(self._rank_rows.rows, np.int64)
        task[: len(local_rows)] = [source for source, _ in local_rows]
        batch = fill_rows(
            [
                [self._sources[source].read(segment, self._weighting) for segment in row]
                for source, row in local_rows
            ],
            count=self._rank_rows.rows,
            width=self.sequence_length,
            end_of_text=self._sources[0].samples.dataset_index.end_of_text,
        )
        return {**batch, **self._media(local_rows, batch["positions"]), "task": task}

    def _media(
        self, rows: Sequence[tuple[int, Row]], positions: NDArray[np.int64]
    ) -> InstructionBatch:
        """Prepare the images and audio of these rows."""
        if self._processor is None:
            return cast(InstructionBatch, {})
        # (length, media) of every segment, by row.
        parts = [
            [
                (segment.stop - segment.start, self._sources[source].media(segment))
                for segment in row
            ]
            for source, row in rows
        ]
        try:
            media = media_batch(parts, self._processor, positions)
        except ValueError as error:
            folders = ", ".join(sorted({self.names[source] for source, _ in rows}))
            raise DamageError(self.folders[0], f"media of {folders}", str(error)) from error
        return cast(InstructionBatch, media)

    def _position(self) -> dict[str, Any]:
        return {
            **self._mixture_state(),
            "sources": [source.state_dict() for source in self._sources],
            # Only the segments: the tokens are read again from disk.
            "ready": [[task, [list(segment) for segment in row]] for task, row in self._ready_rows],
            "rows": self._rows,
            "tokens": self._tokens,
            "flushed": self._flushed,
        }

    def _restore_position(self, position: Mapping[str, Any]) -> None:
        for source, state in zip(self._sources, position["sources"], strict=True):
            source.load_state_dict(state)
        self._ready_rows = deque(
            (read_count(task), tuple(self._sources[task].segment(values) for values in row))
            for task, row in position["ready"]
        )
        self._rows, self._tokens = read_count(position["rows"]), read_count(position["tokens"])
        self._load_mixture_state(position)
        # A finished run can resume with more epochs, so `flushed` only holds at the end.
        at_end = self._end is not None and self._mixture.position >= self._end
        self._flushed = read_bool(position["flushed"]) and at_end


def _common_processor(names: Sequence[str], sources: Sequence[PackedSource]) -> Processor | None:
    """Return the processor that all sources with images or audio share, or None.

    Raises:
        SettingError: the sources have different processors.
    """
    pairs = [(name, source.samples.processor) for name, source in zip(names, sources, strict=True)]
    processors = [(name, processor) for name, processor in pairs if processor is not None]
    for name, processor in processors:
        if processor.settings != processors[0][1].settings:
            raise SettingError(
                f"sources {processors[0][0]!r} and {name!r} were built with different processors, "
                "so one model cannot read both; build both with the same processor"
            )
    return processors[0][1] if processors else None


def _check(open_rows: int, choices: Mapping[str, str]) -> None:
    if not is_integer(open_rows) or open_rows < 0:
        raise SettingError(f"open_rows must be 0 (no packing) or more, got {shown(open_rows)}")
    for name, value in choices.items():
        if not isinstance(value, str) or value not in _CHOICES[name]:
            names = " or ".join(map(repr, _CHOICES[name]))
            raise SettingError(f"{name} must be {names}, got {shown(value)}")
