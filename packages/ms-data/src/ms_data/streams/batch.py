"""Batch types, and filling batch rows with packed samples."""

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from ms_data.disk.samples import Sample

IGNORED = -100
"""Target of tokens without loss."""


class Batch(TypedDict):
    """Input of a training step: b rows of S tokens."""

    tokens: NDArray[np.int64]
    """Shape (b, S)."""
    targets: NDArray[np.int64]
    """Shape (b, S): the next token, or -100 if it belongs to another document."""
    positions: NDArray[np.int64]
    """Shape (b, S): position within the document, counted from its first token in this row."""
    documents: NDArray[np.int32]
    """Shape (b, S): document number within the row, from 0."""


class WeightedBatch(Batch):
    """A batch with a loss weight per token."""

    weights: NDArray[np.float32]
    """Shape (b, S): loss weight of each token; 0 where the target is -100."""


class RowPart(NamedTuple):
    """n tokens of one sample, as placed in a row."""

    tokens: NDArray[np.int64]
    """Shape (n,)."""
    targets: NDArray[np.int64]
    """Shape (n,), or (n - 1,) at the end of the sample."""
    weights: NDArray[np.float32]
    """Same shape as the targets."""

    @classmethod
    def of(cls, sample: Sample, start: int, stop: int, weight: float) -> "RowPart":
        """Cut tokens `start` to `stop` out of a sample; all its targets get the weight `weight`."""
        shifted = slice(start + 1, stop + 1)  # targets are the tokens shifted by one
        mask = sample.loss_mask[shifted]  # (stop - start,)
        # targets without loss are ignored
        targets = np.where(mask, sample.tokens[shifted], IGNORED)
        return cls(sample.tokens[start:stop], targets, mask * np.float32(weight))


def fill_rows(
    rows: Sequence[Sequence[RowPart]], *, count: int, width: int, end_of_text: int
) -> WeightedBatch:
    """Lay parts end to end in rows; every part is a separate document.

    Args:
        rows: at most `count` rows, each with at most `width` tokens in total.
        count: rows in the batch; missing rows have no targets.
        width: tokens per row.
        end_of_text: token that fills the empty space.
    """
    shape = (count, width)  # (b, S)
    batch = WeightedBatch(
        tokens=np.full(shape, end_of_text, np.int64),
        targets=np.full(shape, IGNORED, np.int64),
        positions=np.tile(np.arange(width), (count, 1)),
        documents=np.zeros(shape, np.int32),
        weights=np.zeros(shape, np.float32),
    )
    for row_index, row in enumerate(rows):
        filled = 0
        for document, part in enumerate(row):
            stop, last_target = filled + len(part.tokens), filled + len(part.targets)
            batch["tokens"][row_index, filled:stop] = part.tokens
            batch["targets"][row_index, filled:last_target] = part.targets
            batch["weights"][row_index, filled:last_target] = part.weights
            batch["documents"][row_index, filled:stop] = document
            batch["positions"][row_index, filled:stop] = np.arange(stop - filled)
            filled = stop
        # Padding is a separate document without targets, so no sample attends to it.
        batch["documents"][row_index, filled:] = len(row)
        batch["positions"][row_index, filled:] = np.arange(width - filled)
    return batch
