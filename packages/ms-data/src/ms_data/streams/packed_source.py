"""One set of conversations, drawn in its order and packed into rows of its own."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ms_data.disk.samples import Sample, Samples
from ms_data.errors import SettingError
from ms_data.streams.draws import Draws
from ms_data.streams.packing import OpenRow, Packer, Piece, cut

__all__ = ["Long", "ReadyRows", "Row", "Source", "count"]

Long = Literal["truncate", "split"]
Row = tuple[Piece, ...]


class Source:
    """Draws samples and packs them.

    Args:
        folder: what `build` wrote from an instruction set.
        split: `train` or `held_out`.
        length: tokens in a row.
        seed: of the order.
        shuffle: False draws in the order of the corpus.
        long: what becomes of a sample longer than a row: its beginning is kept, or all its parts.
        open_rows: rows that are packed at a time; 0 gives each sample a row of its own.

    Raises:
        SettingError: the folder holds no conversations, or none with anything to learn.
        DamageError: bytes are not those that were written.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str,
        *,
        length: int,
        seed: int,
        shuffle: bool,
        long: Long,
        open_rows: int,
    ) -> None:
        self.samples = Samples(folder, split)
        if self.samples.kind != "conversations":
            raise SettingError(f"{folder} holds preference pairs; read it with PreferenceStream")
        self.drawn = 0
        """Samples drawn so far, all epochs together."""
        self.truncated = self.split = self.unlearnt = 0
        """Samples cut off, samples cut in parts, pieces left out as nothing in them is learnt."""
        self._draws = Draws(len(self.samples), seed=seed, shuffle=shuffle)
        self._length, self._long = length, long
        self._packer = Packer(length, window=open_rows) if open_rows else None
        if not any(self._pieces(one) for one in range(len(self.samples))):
            raise SettingError(
                f"{folder}: no sample of split {split!r} has anything to learn within "
                f"{length} tokens; raise sequence_length, or look at the data"
            )

    def draw(self) -> list[Row]:
        """Draws one sample; returns the rows that are full by it."""
        number = self._draws[self.drawn]
        self.drawn += 1
        pieces = self._pieces(number)
        size = int(self.samples.sizes[number])
        if size > self._length:
            parts = len(cut(number, size, self._length, split=self._long == "split"))
            self.unlearnt += parts - len(pieces)
            self.truncated += self._long == "truncate"
            self.split += self._long == "split"
        elif not pieces:
            self.unlearnt += 1
        if self._packer is None:
            return [(piece,) for piece in pieces]
        return [row for piece in pieces for row in self._packer.add(piece)]

    def flush(self) -> list[Row]:
        """The rows that are not full."""
        return self._packer.flush() if self._packer else []

    def _pieces(self, number: int) -> list[Piece]:
        """The parts of a sample in which something is learnt."""
        size = int(self.samples.sizes[number])
        pieces = cut(number, size, self._length, split=self._long == "split")
        if 1 < size <= self._length:
            return list(pieces)
        learnt = self.samples.conversation(number).learnt
        return [piece for piece in pieces if learnt[piece.start + 1 : piece.stop + 1].any()]

    def read(self, piece: Piece) -> tuple[Sample, np.ndarray[Any, np.dtype[np.int64]], int]:
        """A piece, its targets, and how many are learnt of its sample.

        The targets are as many as the inputs, or one less at the sample's end. Of a sample that
        is cut in parts all count; of one that is cut off, those that are left.
        """
        whole = self.samples.conversation(piece.sample)
        tokens = whole.tokens[piece.start : piece.stop]
        after = slice(piece.start + 1, piece.stop + 1)
        learnt = whole.learnt[after]
        count = int((whole.learnt[1:] if self._long == "split" else learnt).sum())
        return Sample(tokens, learnt, whole.weight), whole.tokens[after], count

    def state(self) -> dict[str, Any]:
        """JSON values that `restore` takes."""
        packer = self._packer
        return {
            "drawn": self.drawn,
            "truncated": self.truncated,
            "split": self.split,
            "unlearnt": self.unlearnt,
            "opened": packer.opened if packer else 0,
            "open": [
                [row.number, [list(one) for one in row.pieces]]
                for row in (packer.open_rows if packer else ())
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to where `state` was taken.

        Raises:
            ValueError: it cannot be this source's.
        """
        rows = [
            OpenRow(count(number), tuple(self.piece(one) for one in pieces))
            for number, pieces in state["open"]
        ]
        if self._packer:
            self._packer.restore(rows, count(state["opened"]))
        self.drawn, self.truncated = count(state["drawn"]), count(state["truncated"])
        self.split, self.unlearnt = count(state["split"]), count(state["unlearnt"])

    def piece(self, values: Any) -> Piece:
        """A piece from its JSON values.

        Raises:
            ValueError: there is no such piece.
        """
        piece = Piece(*(count(one) for one in values))
        sound = piece.sample < len(self.samples)
        if not sound or not piece.start < piece.stop <= self.samples.sizes[piece.sample]:
            raise ValueError(f"{piece} is no piece of a sample here")
        return piece


def count(value: Any) -> int:
    """A whole number of 0 or more from its JSON value.

    Raises:
        ValueError: it is not one.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} stands where a count must")
    return value


ReadyRows = deque[tuple[int, Row]]
"""Rows that are full and not delivered yet, each with the number of its source."""
