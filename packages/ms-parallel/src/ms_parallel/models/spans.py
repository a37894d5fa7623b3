"""Document lengths of packed rows, with which CPU attention skips masked pairs.

A document of length n needs n² scores, its row of length S needs S²: for rows of 512 with documents
of 100 tokens, attention on a CPU takes half the time.
"""

import torch
from torch import Tensor

from ms_parallel.operators.packed_rows import packed_lengths
from ms_parallel.torch_private import unset_fake_temporarily

SHORTEST_MEAN = 64
"""Minimum mean document length; below it, many small calls cost more than one masked call."""


def document_lengths(documents: Tensor | None) -> tuple[int, ...] | None:
    """Return the document lengths of all rows in order; None if a mask is better.

    Args:
        documents: (B, S) int32 or None. The result is None for short documents, one document per
            row, a document number that reappears later in its row, devices other than the CPU, and
            while torch.compile traces.
    """
    if torch.compiler.is_compiling():
        return None
    if documents is None or documents.device.type != "cpu" or not documents.numel():
        return None
    with unset_fake_temporarily():  # documents are real when memory is predicted
        lengths = packed_lengths(documents)
    if lengths is None or len(lengths) == len(documents):
        return None
    return lengths if len(lengths) * SHORTEST_MEAN <= documents.numel() else None
