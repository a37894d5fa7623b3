"""Batches of preference pairs: two rows a pair, chosen above rejected."""

import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ms_data.disk.samples import Sample, Samples
from ms_data.errors import SettingError, StateError
from ms_data.streams.draws import Draws
from ms_data.streams.tokens import Place
from ms_data.streams.window import IGNORED, Batch

__all__ = ["PreferenceBatch", "PreferenceStream"]

STATE_VERSION = 1
WIDTH_STEP = 8
"""Rows are as wide as the longest of the global batch, rounded up to a multiple of this."""


class PreferenceBatch(Batch):
    """A batch of pairs; rows 2i and 2i + 1 are the chosen and the rejected part of one."""

    weights: NDArray[np.float32]
    """Shape (b, S): the pair's weight where there is a target, 0 elsewhere."""
    margin: NDArray[np.float32]
    """Shape (b,): by how much the chosen part is better, the same for both rows of a pair."""


class PreferenceStream(Iterator[PreferenceBatch]):
    """Global batches of pairs, of which each place receives its own.

    A pair one of whose parts has nothing left to learn within `sequence_length` tokens is left
    out and counted; others that are longer are cut off and counted.

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
        place: Place | None = None,
        split: str = "train",
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        if sequence_length < 2 or batch_size < 1 or (epochs is not None and epochs < 1):
            raise SettingError(
                f"sequence_length {sequence_length}, batch_size {batch_size}, epochs {epochs}: "
                "give 2 tokens, 1 pair and 1 epoch or more"
            )
        self._rank, self._count = (place.rank, place.count) if place else (0, 1)
        if not 0 <= self._rank < self._count or batch_size % self._count:
            raise SettingError(
                f"rank {self._rank} of {self._count} cannot share a batch_size of {batch_size}; "
                "take a multiple of the count"
            )
        self.samples = Samples(folder, split)
        self.folders = (Path(folder),)
        """Where the pairs lie, with the tokenizer that made them."""
        self.sequence_length = operator.index(sequence_length)
        self.batch_size = operator.index(batch_size)
        self._kept = [one for one in range(len(self.samples)) if self._fits(one)]
        self.left_out = len(self.samples) - len(self._kept)
        """Pairs of an epoch that are left out, as a part has nothing to learn in this length."""
        if not self._kept:
            raise SettingError(
                f"{folder}: no pair of split {split!r} has both answers within {sequence_length} "
                "tokens; raise sequence_length"
            )
        self._draws = Draws(len(self._kept), seed=operator.index(seed), shuffle=shuffle)
        self._last = None if epochs is None else epochs * len(self._kept)
        self._drawn = 0
        self._settings = {
            "dataset": self.samples.fingerprint,
            "split": split,
            "sequence_length": self.sequence_length,
            "seed": operator.index(seed),
            "shuffle": bool(shuffle),
        }

    @property
    def pairs_per_epoch(self) -> int:
        """Pairs that are delivered in an epoch."""
        return len(self._kept)

    @property
    def vocabulary_size(self) -> int:
        """Every token is below it."""
        return self.samples.vocabulary_size

    @property
    def consumed_pairs(self) -> int:
        """Pairs that all places together have received."""
        return self._drawn

    def __iter__(self) -> "PreferenceStream":
        return self

    def __next__(self) -> PreferenceBatch:
        left = self.batch_size if self._last is None else self._last - self._drawn
        if left <= 0:
            raise StopIteration
        draws = range(self._drawn, self._drawn + min(left, self.batch_size))
        pairs = [self.samples.pair(self._kept[self._draws[draw]]) for draw in draws]
        longest = max(len(part.tokens) for pair in pairs for part in pair[:2])
        width = min(self.sequence_length, -(-longest // WIDTH_STEP) * WIDTH_STEP)
        share = self.batch_size // self._count
        shape = (2 * share, width)
        batch = PreferenceBatch(
            tokens=np.full(shape, self.samples.end_of_text, np.int64),
            targets=np.full(shape, IGNORED, np.int64),
            positions=np.tile(np.arange(width), (2 * share, 1)),
            documents=np.zeros(shape, np.int32),
            weights=np.zeros(shape, np.float32),
            margin=np.zeros(2 * share, np.float32),
        )
        for at, pair in enumerate(pairs[self._rank * share : (self._rank + 1) * share]):
            for row, part in ((2 * at, pair.chosen), (2 * at + 1, pair.rejected)):
                _fill(batch, row, part, pair.weight)
                batch["margin"][row] = pair.margin
        self._drawn += len(pairs)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: JSON values, the same on every place."""
        return {"version": STATE_VERSION, "consumed_pairs": self._drawn, **self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to where `state` was taken; batch size and number of places may differ.

        Raises:
            StateError: the state is of other data or other settings; names what differs.
        """
        for name, value in {"version": STATE_VERSION, **self._settings}.items():
            if state.get(name) != value:
                raise StateError(
                    f"stream state has {name} {state.get(name)!r} where this stream has "
                    f"{value!r}; make the stream as it was, or start it anew"
                )
        drawn = state.get("consumed_pairs")
        if type(drawn) is not int or drawn < 0:
            raise StateError(f"stream state has consumed_pairs {drawn!r}; it is damaged")
        self._drawn = drawn

    def _fits(self, number: int) -> bool:
        if int(self.samples.sizes[number]) <= self.sequence_length:
            return True
        pair = self.samples.pair(number)
        return all(
            bool(part.learnt[1 : self.sequence_length + 1].any())
            for part in (pair.chosen, pair.rejected)
        )


def _fill(batch: PreferenceBatch, row: int, part: Sample, weight: float) -> None:
    width = batch["tokens"].shape[1]
    tokens = part.tokens[:width]
    following, learnt = part.tokens[1 : width + 1], part.learnt[1 : width + 1]
    batch["tokens"][row, : len(tokens)] = tokens
    batch["targets"][row, : len(following)] = np.where(learnt, following, IGNORED)
    batch["weights"][row, : len(following)] = learnt * np.float32(weight)
    batch["documents"][row, len(tokens) :] = 1
    batch["positions"][row, len(tokens) :] = np.arange(width - len(tokens))
