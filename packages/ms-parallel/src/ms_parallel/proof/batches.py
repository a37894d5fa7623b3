"""Batches for proofs: packed rows with documents of random lengths, from one token up."""

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

from ms_parallel.cluster.groups import Groups

ROWS, LENGTH = 4, 16
IGNORED = -100


@frozen(kw_only=True)
class DocumentSpan:
    """A document of a batch."""

    row: int
    start: int
    end: int

    @property
    def slices(self) -> tuple[int, slice]:
        """Index of the document in tensors (B, S, ...)."""
        return self.row, slice(self.start, self.end)


def draw_batch(vocabulary: int, seed: int) -> dict[str, Tensor]:
    """Draw a global batch of packed rows; later rows have fewer targets.

    Args:
        vocabulary: vocabulary size.
        seed: random seed.
    """
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, vocabulary, (ROWS, LENGTH + 1), generator=generator)
    starts = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    starts[:, 0] = True
    for row in range(ROWS):
        cut = int(torch.randint(2, LENGTH - 3, (), generator=generator))
        starts[row, [cut, cut + 1]] = True  # a document of one token between two others
    documents = starts.cumsum(1).int() - 1
    index = torch.arange(LENGTH).expand(ROWS, LENGTH)
    document_start = torch.where(starts, index, 0).cummax(1).values
    targets = text[:, 1:].clone()
    # The last token of a document has no target, as the next token is in another document.
    targets[:, :-1][starts[:, 1:]] = IGNORED
    # Row r ignores its first r targets, so rows weigh differently.
    targets[index < torch.arange(ROWS)[:, None]] = IGNORED
    return {
        "tokens": text[:, :-1].contiguous(),
        "targets": targets,
        "positions": index - document_start,
        "documents": documents,
        "weights": torch.rand(ROWS, LENGTH, generator=generator) + 0.5,
    }


def spans_of(batch: dict[str, Tensor]) -> list[DocumentSpan]:
    """List the documents of a batch in row order."""
    spans = []
    for row, documents in enumerate(batch["documents"]):
        counts = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
        start = 0
        for count in counts:
            spans.append(DocumentSpan(row=row, start=start, end=start + count))
            start += count
    return spans


def local_rows(batch: Mapping[str, Tensor], groups: Groups) -> dict[str, Tensor]:
    """Return this process's rows of a global batch."""
    count = len(batch["tokens"]) // groups.place.count
    start = groups.place.rank * count
    return {name: value[start : start + count] for name, value in batch.items()}
