"""Cuts packed rows into their documents, so that attention on a CPU skips masked pairs.

Documents of length n need n² scores where their row of S needs S²: with rows of 512 that hold
documents of a hundred tokens, attention on a CPU takes half the time.
"""

import torch
from torch import Tensor

from ms_parallel.operators.packed_rows import packed_lengths
from ms_parallel.torch_private import unset_fake_temporarily

SHORTEST_MEAN = 64
"""Mean length of documents below which many small calls cost more than one masked call."""


def document_lengths(documents: Tensor | None) -> tuple[int, ...] | None:
    """Return the lengths of all rows' documents, row after row; None where a mask is better.

    Args:
        documents: (B, S) int32 or None. The result is None for short documents, one document per
            row, a number that comes back later in its row, other devices than the CPU, and while
            torch.compile traces.
    """
    if torch.compiler.is_compiling():
        return None
    if documents is None or documents.device.type != "cpu" or not documents.numel():
        return None
    with unset_fake_temporarily():  # memory is predicted with the documents of a real batch
        lengths = packed_lengths(documents)
    if lengths is None or len(lengths) == len(documents):
        return None
    return lengths if len(lengths) * SHORTEST_MEAN <= documents.numel() else None
