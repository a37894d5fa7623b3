"""Streams preference pairs for training: two rows a pair, chosen above rejected."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ms_data.disk.samples import Samples
from ms_data.disk.split import dataset_folder
from ms_data.errors import SettingError
from ms_data.settings.arguments import check_counts
from ms_data.streams.batch import RowPart, WeightedBatch, fill_rows
from ms_data.streams.draws import Draws
from ms_data.streams.share import BatchStream, StreamPlace, count

WIDTH_STEP = 8
"""Rows are as wide as the longest of the global batch, rounded up to a multiple of this."""


class PreferenceBatch(WeightedBatch):
    """A batch of pairs; rows 2i and 2i + 1 are the chosen and the rejected part of one."""

    margin: NDArray[np.float32]
    """Shape (b,): by how much the chosen part is better, the same for both rows of a pair."""


class PreferenceStream(BatchStream[PreferenceBatch]):
    """Global batches of pairs, of which each process receives its own.

    A pair one of whose parts has no target within `sequence_length` tokens is left out and
    counted; others that are longer are cut off and counted.

    Args:
        folder: what `build(..., chat=..., pairs=True)` wrote.
        sequence_length: tokens in a row at most.
        batch_size: pairs in a global batch.
        seed: any integer; another seed is another order.
        place: has `rank` and `count`; see `TokenStream`.
        split: which part of the data, `train` or `held_out`.
        shuffle: False draws in the order of the corpus.
        epochs: stop after the last pair of so many; the last batch is filled up with rows that
            hold no target. None never stops.

    Raises:
        SettingError: an argument is out of range, or no pair fits.
        DamageError: bytes are not those that were written.
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
    ) -> None:
        check_counts(sequence_length=sequence_length)
        if sequence_length < 2:
            raise SettingError(f"sequence_length is {sequence_length}; it must be 2 or more")
        super().__init__(
            sequence_length=sequence_length,
            batch_size=batch_size,
            seed=seed,
            place=place,
            split=split,
            shuffle=shuffle,
            epochs=epochs,
        )
        self.samples = Samples(folder, split, kind="preferences")
        self.folders = (dataset_folder(folder),)
        """Where the pairs lie, with the tokenizer that made them."""
        self.cut_off = 0
        """Pairs of an epoch one of whose parts is longer and loses its last tokens."""
        self._kept = [number for number in range(len(self.samples)) if self._fits(number)]
        self.left_out = len(self.samples) - len(self._kept)
        """Pairs of an epoch that are left out, as a part has no target in this length."""
        if not self._kept:
            raise SettingError(
                f"{folder}: no pair of split {split!r} has both answers within {sequence_length} "
                "tokens; raise sequence_length"
            )
        self._draws = Draws(len(self._kept), seed=self._settings["seed"], shuffle=shuffle)
        self._last = None if epochs is None else epochs * len(self._kept)
        self._drawn = 0
        self._is_of_one_dataset()

    @property
    def fingerprint(self) -> str:
        """Name the data by its content."""
        return self.samples.dataset_index.fingerprint

    @property
    def pairs_per_epoch(self) -> int:
        """Pairs that are delivered in an epoch."""
        return len(self._kept)

    @property
    def vocabulary_size(self) -> int:
        """Every token is below it."""
        return self.samples.dataset_index.vocabulary_size

    @property
    def consumed_pairs(self) -> int:
        """Pairs that all processes together have received."""
        return self._drawn

    def __next__(self) -> PreferenceBatch:
        left = self.batch_size if self._last is None else self._last - self._drawn
        if left <= 0:
            raise StopIteration
        draws = range(self._drawn, self._drawn + min(left, self.batch_size))
        pairs = [self.samples.pair(self._kept[self._draws[draw]]) for draw in draws]
        longest = max(len(part.tokens) for pair in pairs for part in pair[:2])
        width = min(self.sequence_length, -(-longest // WIDTH_STEP) * WIDTH_STEP)
        own, rows = self._share.of(pairs), 2 * self._share.rows
        parts = [[RowPart.of(part, 0, width, one.weight)] for one in own for part in one[:2]]
        end = self.samples.dataset_index.end_of_text
        margin = np.zeros(rows, np.float32)
        margin[: 2 * len(own)] = np.repeat([pair.margin for pair in own], 2)
        self._drawn += len(pairs)
        return {**fill_rows(parts, count=rows, width=width, end_of_text=end), "margin": margin}

    def _position(self) -> dict[str, Any]:
        return {"consumed_pairs": self._drawn}

    def _go_to(self, position: Mapping[str, Any]) -> None:
        self._drawn = count(position["consumed_pairs"])

    def _fits(self, number: int) -> bool:
        """Return whether both parts of a pair have targets within a row; count it if cut off."""
        if int(self.samples.sizes[number]) <= self.sequence_length:
            return True
        # A row of S tokens has S targets, so the sample that fills it has one token more.
        stop = self.sequence_length + 1
        parts = self.samples.pair(number)[:2]
        fits = all(bool(part.loss_mask[1:stop].any()) for part in parts)
        self.cut_off += fits and any(len(part.tokens) > stop for part in parts)
        return fits
