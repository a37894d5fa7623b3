"""Batches of conversations for training: mixed, packed, split over ranks, resumable exactly."""

import operator
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ms_data.errors import SettingError, StateError
from ms_data.streams.mixture import Mixture, Phase
from ms_data.streams.packed_source import Long, ReadyRows, Row, Source, count
from ms_data.streams.tokens import Place
from ms_data.streams.window import IGNORED, Batch

__all__ = ["InstructionBatch", "InstructionStream"]

STATE_VERSION = 1


class InstructionBatch(Batch):
    """A batch of packed conversations; b rows of S tokens."""

    weights: NDArray[np.float32]
    """Shape (b, S): how much a token's loss counts, 0 where the target is -100."""
    task: NDArray[np.int64]
    """Shape (b,): the number of the source; the documents of a row are of one source."""


class InstructionStream(Iterator[InstructionBatch]):
    """Global batches of packed rows, of which each place receives its own.

    Samples are drawn from the sources as a `Mixture` says and packed source by source. Which
    samples lie in which row depends on the data, the seed and the settings alone: not on the
    number of places, nor on the batch size.

    Args:
        sources: a folder that `build(..., chat=...)` wrote, or several, by name.
        sequence_length: tokens in a row, S.
        batch_size: rows in a global batch.
        seed: any integer; another seed is another order.
        place: has `rank` and `count`; see `TokenStream`.
        split: which part of the data, `train` or `held_out`.
        weights: how often samples of each source are drawn, by name or in their order, or
            `Phase`s; by default as many as each holds.
        long: a sample longer than a row is cut off (`truncate`) or cut in parts (`split`).
        open_rows: rows packed at a time for each source; 0 gives each sample a row of its own.
        weighting: `token` counts each learnt token alike, `sample` each sample.
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
        sources: str | Path | Mapping[str, str | Path],
        *,
        sequence_length: int,
        batch_size: int,
        seed: int = 0,
        place: Place | None = None,
        split: str = "train",
        weights: Mapping[str, float] | Sequence[float] | Sequence[Phase] | None = None,
        long: Long = "truncate",
        open_rows: int = 512,
        weighting: Literal["token", "sample"] = "token",
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        folders = sources if isinstance(sources, Mapping) else {Path(sources).name: sources}
        _check(sequence_length, batch_size, open_rows, epochs, long, weighting)
        self.folders = tuple(Path(folder) for folder in folders.values())
        """Where the sources lie, with the tokenizer that made them."""
        self._rank, self._count = (place.rank, place.count) if place else (0, 1)
        if not 0 <= self._rank < self._count or batch_size % self._count:
            raise SettingError(
                f"rank {self._rank} of {self._count} cannot share a batch_size of {batch_size}; "
                "take a multiple of the count"
            )
        self.sequence_length = operator.index(sequence_length)
        self.batch_size = operator.index(batch_size)
        self.names = tuple(folders)
        """The sources; `task` counts them from 0."""
        self._sources = [
            Source(
                folder,
                split,
                length=self.sequence_length,
                seed=operator.index(seed) * 1_000_003 + number,
                shuffle=shuffle,
                long=long,
                open_rows=operator.index(open_rows),
            )
            for number, folder in enumerate(folders.values())
        ]
        self._mixture = Mixture(self.names, self._weights(weights))
        self._check_tokenizers()
        self._weighting = weighting
        self._last = None if epochs is None else epochs * self.samples_per_epoch
        self._settings = {
            "sources": {
                name: source.samples.fingerprint
                for name, source in zip(self.names, self._sources, strict=True)
            },
            "split": split,
            "sequence_length": self.sequence_length,
            "seed": operator.index(seed),
            "shuffle": bool(shuffle),
            "long": long,
            "open_rows": operator.index(open_rows),
        }
        self._ready: ReadyRows = deque()
        self._rows = self._tokens = 0
        self._flushed = False

    def _check_tokenizers(self) -> None:
        first = self._sources[0].samples.tokenizer
        for name, source in zip(self.names, self._sources, strict=True):
            if source.samples.tokenizer != first:
                raise SettingError(
                    f"sources {self.names[0]!r} and {name!r} were built with different tokenizers "
                    "or ends of text, so their tokens mean different things; build both with one"
                )

    def _weights(
        self, weights: Mapping[str, float] | Sequence[float] | Sequence[Phase] | None
    ) -> Sequence[float] | Sequence[Phase]:
        if weights is None:
            return [float(len(source.samples)) for source in self._sources]
        if isinstance(weights, Mapping):
            if set(weights) != set(self.names):
                raise SettingError(
                    f"weights are for {sorted(weights)}; give one for each of {sorted(self.names)}"
                )
            return [weights[name] for name in self.names]
        return weights

    @property
    def samples_per_epoch(self) -> int:
        """Samples of all sources together."""
        return sum(len(source.samples) for source in self._sources)

    @property
    def vocabulary_size(self) -> int:
        """Every token is below it."""
        return max(source.samples.vocabulary_size for source in self._sources)

    @property
    def mixture(self) -> Mixture:
        """The ledger of what was drawn from where."""
        return self._mixture

    @property
    def delivered_rows(self) -> int:
        """Rows that all places together have received, those without samples left out."""
        return self._rows

    @property
    def fill(self) -> float:
        """Share of the delivered rows' places that hold tokens of samples."""
        return self._tokens / max(1, self._rows * self.sequence_length)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """For each source: samples `drawn`, `truncated` and `split`, and pieces `unlearnt`."""
        wanted = ("drawn", "truncated", "split", "unlearnt")
        return {
            name: {key: int(getattr(source, key)) for key in wanted}
            for name, source in zip(self.names, self._sources, strict=True)
        }

    def change_weights(self, weights: Mapping[str, float] | Sequence[float]) -> int:
        """Other weights from now on; see `Mixture.change`."""
        return self._mixture.change(weights)

    def __iter__(self) -> "InstructionStream":
        return self

    def __next__(self) -> InstructionBatch:
        while len(self._ready) < self.batch_size and not self._flushed:
            if self._last is not None and self._mixture.position >= self._last:
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
        """A global batch whose rows are of these sources, drawn apart from the mixture.

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
        share = self.batch_size // self._count
        return self._batch(rows[self._rank * share : (self._rank + 1) * share], share)

    def _batch(self, rows: list[tuple[int, Row]], count: int) -> InstructionBatch:
        shape = (count, self.sequence_length)
        batch = InstructionBatch(
            tokens=np.full(shape, self._sources[0].samples.end_of_text, np.int64),
            targets=np.full(shape, IGNORED, np.int64),
            positions=np.tile(np.arange(self.sequence_length), (count, 1)),
            documents=np.zeros(shape, np.int32),
            weights=np.zeros(shape, np.float32),
            task=np.zeros(count, np.int64),
        )
        for at, (task, row) in enumerate(rows):
            batch["task"][at] = task
            self._fill(batch, at, self._sources[task], row)
        return batch

    def _fill(self, batch: InstructionBatch, at: int, source: Source, row: Row) -> None:
        done = 0
        for document, piece in enumerate(row):
            sample, following, learnt = source.read(piece)
            stop, last = done + len(sample.tokens), done + len(following)
            batch["tokens"][at, done:stop] = sample.tokens
            batch["targets"][at, done:last] = np.where(sample.learnt, following, IGNORED)
            shared = learnt if self._weighting == "sample" else 1
            batch["weights"][at, done:last] = sample.learnt * (sample.weight / max(1, shared))
            batch["documents"][at, done:stop] = document
            batch["positions"][at, done:stop] = np.arange(stop - done)
            done = stop
        # What is left is a document of its own, which nothing sees and nothing learns from.
        batch["documents"][at, done:] = len(row)
        batch["positions"][at, done:] = np.arange(self.sequence_length - done)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: JSON values, the same on every place."""
        return {
            "version": STATE_VERSION,
            "settings": self._settings,
            "mixture": self._mixture.state_dict(),
            "sources": [source.state() for source in self._sources],
            "ready": [[task, [list(piece) for piece in row]] for task, row in self._ready],
            "rows": self._rows,
            "tokens": self._tokens,
            "flushed": self._flushed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to where `state` was taken; batch size and number of places may differ.

        Raises:
            StateError: the state is of other data or other settings; names what differs.
        """
        if state.get("version") != STATE_VERSION:
            raise StateError(
                f"stream state has version {state.get('version')!r}, this ms-data reads "
                f"{STATE_VERSION}; resume with the ms-data that wrote it"
            )
        settings = state.get("settings")
        settings = settings if isinstance(settings, Mapping) else {}
        for name, value in self._settings.items():
            if settings.get(name) != value:
                raise StateError(
                    f"stream state has {name} {settings.get(name)!r} where this stream has "
                    f"{value!r}; make the stream as it was, or start it anew"
                )
        before = self.state_dict()
        try:
            self._restore(state)
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            self._restore(before)
            raise StateError(f"stream state is damaged: {error}") from error

    def _restore(self, state: Mapping[str, Any]) -> None:
        for source, one in zip(self._sources, state["sources"], strict=True):
            source.restore(one)
        self._ready = deque(
            (count(task), tuple(self._sources[task].piece(piece) for piece in pieces))
            for task, pieces in state["ready"]
        )
        self._rows, self._tokens = count(state["rows"]), count(state["tokens"])
        self._mixture.load_state_dict(state["mixture"])
        # Of a run that ended, a longer one goes on.
        reached = self._last is not None and self._mixture.position >= self._last
        self._flushed = bool(state["flushed"]) and reached


def _check(
    sequence_length: int,
    batch_size: int,
    open_rows: int,
    epochs: int | None,
    long: str,
    weighting: str,
) -> None:
    numbers = {"sequence_length": sequence_length, "batch_size": batch_size, "epochs": epochs}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise SettingError(f"{name} is {value!r}; it must be 1 or more")
    if open_rows < 0:
        raise SettingError(f"open_rows is {open_rows}; it must be 0 (no packing) or more")
    if long not in ("truncate", "split"):
        raise SettingError(f"long is {long!r}; it must be 'truncate' or 'split'")
    if weighting not in ("token", "sample"):
        raise SettingError(f"weighting is {weighting!r}; it must be 'token' or 'sample'")
