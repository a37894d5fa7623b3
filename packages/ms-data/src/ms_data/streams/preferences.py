"""Streams preference pairs for training: two rows per pair, chosen before rejected."""

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
from ms_data.streams.draws import DrawSequence
from ms_data.streams.share import BatchStream, StreamPlace, read_count

WIDTH_STEP = 8
"""Row width: the longest row of the global batch, rounded up to a multiple of this."""


class PreferenceBatch(WeightedBatch):
    """A batch of pairs; rows 2i and 2i + 1 are the chosen and the rejected response of pair i."""

    margin: NDArray[np.float32]
    """Shape (b,): margin by which the chosen response is better; equal in both rows of a pair."""


class PreferenceStream(BatchStream[PreferenceBatch]):
    """Global batches of pairs, from which every process receives its pairs.

    Pairs with a response that has no target within `sequence_length` tokens are dropped and
    counted in `left_out`; other pairs that are longer are truncated and counted in `cut_off`.

    Args:
        folder: output folder of `build(..., chat=..., pairs=True)`.
        sequence_length: maximum tokens per row.
        batch_size: pairs per global batch.
        seed: random seed of the order.
        place: object with `rank` and `count`; see `TokenStream`.
        split: `train` or `held_out`.
        shuffle: False keeps the order of the corpus.
        epochs: stop after this number of passes; the last batch is padded with rows without
            targets. None: never stop.

    Raises:
        SettingError: an argument is out of range, or no pair fits.
        DamageError: data on disk is damaged.
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
            raise SettingError(f"sequence_length must be 2 or more, got {sequence_length}")
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
        """The dataset folder, which contains the tokenizer."""
        self.cut_off = 0
        """Pairs per epoch with a truncated response."""
        self._usable_pairs = [number for number in range(len(self.samples)) if self._fits(number)]
        self.left_out = len(self.samples) - len(self._usable_pairs)
        """Pairs per epoch that are dropped because a response has no target in this length."""
        if not self._usable_pairs:
            raise SettingError(
                f"{folder}: no pair of split {split!r} has targets of both responses within "
                f"{sequence_length} tokens; raise sequence_length"
            )
        self._draws = DrawSequence(
            len(self._usable_pairs), seed=self._settings["seed"], shuffle=shuffle
        )
        self._last = None if epochs is None else epochs * len(self._usable_pairs)
        self._consumed_pairs = 0
        self._identify_by_fingerprint()

    @property
    def fingerprint(self) -> str:
        """Hash that identifies the content of the data."""
        return self.samples.dataset_index.fingerprint

    @property
    def pairs_per_epoch(self) -> int:
        """Pairs delivered per epoch."""
        return len(self._usable_pairs)

    @property
    def vocabulary_size(self) -> int:
        """Vocabulary size; all tokens are below it."""
        return self.samples.dataset_index.vocabulary_size

    @property
    def consumed_pairs(self) -> int:
        """Pairs delivered to all processes so far."""
        return self._consumed_pairs

    def __next__(self) -> PreferenceBatch:
        remaining = self.batch_size if self._last is None else self._last - self._consumed_pairs
        if remaining <= 0:
            raise StopIteration
        draws = range(self._consumed_pairs, self._consumed_pairs + min(remaining, self.batch_size))
        pairs = [self.samples.pair(self._usable_pairs[self._draws[draw]]) for draw in draws]
        # All ranks see the same pairs here, so all use the same width.
        longest = max(len(part.tokens) for pair in pairs for part in pair[:2])
        width = min(self.sequence_length, -(-longest // WIDTH_STEP) * WIDTH_STEP)
        local_pairs, rows = self._rank_rows.of(pairs), 2 * self._rank_rows.rows
        parts = [
            [RowPart.of(part, 0, width, pair.weight)] for pair in local_pairs for part in pair[:2]
        ]
        end_of_text = self.samples.dataset_index.end_of_text
        margin = np.zeros(rows, np.float32)
        # (2 * pairs,): chosen and rejected rows alternate.
        margin[: 2 * len(local_pairs)] = np.repeat([pair.margin for pair in local_pairs], 2)
        self._consumed_pairs += len(pairs)
        return {
            **fill_rows(parts, count=rows, width=width, end_of_text=end_of_text),
            "margin": margin,
        }

    def _position(self) -> dict[str, Any]:
        return {"consumed_pairs": self._consumed_pairs}

    def _restore_position(self, position: Mapping[str, Any]) -> None:
        self._consumed_pairs = read_count(position["consumed_pairs"])

    def _fits(self, number: int) -> bool:
        """Return whether both responses have targets within a row; count the pair if truncated."""
        # Both responses together are no longer than a row, so each fits; this reads nothing.
        if int(self.samples.sizes[number]) <= self.sequence_length:
            return True
        # A row of S tokens has S targets, so it uses S + 1 tokens of a sample.
        stop = self.sequence_length + 1
        parts = self.samples.pair(number)[:2]
        fits = all(bool(part.loss_mask[1:stop].any()) for part in parts)
        self.cut_off += fits and any(len(part.tokens) > stop for part in parts)
        return fits
