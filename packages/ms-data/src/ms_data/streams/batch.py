"""Defines batches, and fills their rows part by part."""

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from ms_data.disk.samples import Sample

IGNORED = -100
"""The target of a token that predicts nothing."""


class Batch(TypedDict):
    """What a training step reads; b rows of S tokens."""

    tokens: NDArray[np.int64]
    """Shape (b, S)."""
    targets: NDArray[np.int64]
    """Shape (b, S): the next token, or -100 where it belongs to another document."""
    positions: NDArray[np.int64]
    """Shape (b, S): distance from the first token of the document in this row."""
    documents: NDArray[np.int32]
    """Shape (b, S): counts the documents of a row from 0."""


class WeightedBatch(Batch):
    """A batch whose tokens count differently."""

    weights: NDArray[np.float32]
    """Shape (b, S): how much a token's loss counts, 0 where the target is -100."""


class RowPart(NamedTuple):
    """The tokens of one sample in a row, n of them."""

    tokens: NDArray[np.int64]
    """Shape (n,)."""
    targets: NDArray[np.int64]
    """Shape (n,), or (n - 1,) where the sample ends."""
    weights: NDArray[np.float32]
    """The same shape as the targets."""

    @classmethod
    def of(cls, sample: Sample, start: int, stop: int, weight: float) -> "RowPart":
        """Take tokens `start` to `stop` of a sample, whose targets all have this weight."""
        after = slice(start + 1, stop + 1)
        mask = sample.loss_mask[after]
        targets = np.where(mask, sample.tokens[after], IGNORED)
        return cls(sample.tokens[start:stop], targets, mask * np.float32(weight))


def fill_rows(
    rows: Sequence[Sequence[RowPart]], *, count: int, width: int, end_of_text: int
) -> WeightedBatch:
    """Fill rows with parts laid end to end, each part a document of its own.

    Args:
        rows: at most `count` of them, each of `width` tokens at most.
        count: rows of the batch; those that are missing hold no target.
        width: tokens of a row.
        end_of_text: the token that stands where nothing else does.
    """
    shape = (count, width)
    batch = WeightedBatch(
        tokens=np.full(shape, end_of_text, np.int64),
        targets=np.full(shape, IGNORED, np.int64),
        positions=np.tile(np.arange(width), (count, 1)),
        documents=np.zeros(shape, np.int32),
        weights=np.zeros(shape, np.float32),
    )
    for at, row in enumerate(rows):
        done = 0
        for document, part in enumerate(row):
            stop, last = done + len(part.tokens), done + len(part.targets)
            batch["tokens"][at, done:stop] = part.tokens
            batch["targets"][at, done:last] = part.targets
            batch["weights"][at, done:last] = part.weights
            batch["documents"][at, done:stop] = document
            batch["positions"][at, done:stop] = np.arange(stop - done)
            done = stop
        # What is left is a document of its own, which nothing sees and nothing learns from.
        batch["documents"][at, done:] = len(row)
        batch["positions"][at, done:] = np.arange(width - done)
    return batch
