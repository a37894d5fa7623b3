"""Document lengths of packed rows, which let CPU attention skip masked pairs.

A document of length n needs n² scores, a row of length S needs S²: for rows of 512 tokens with
documents of 100, attention on a CPU takes half the time.
"""

import torch
from torch import Tensor

from ms_parallel.operators.packed_rows import packed_lengths
from ms_parallel.torch_private import unset_fake_temporarily

MIN_MEAN_LENGTH = 64
"""Minimum mean document length; below it, many small calls cost more than one masked call."""


def document_lengths(documents: Tensor | None) -> tuple[int, ...] | None:
    """Return the document lengths of all rows, in order; None to use a mask instead.

    A mask is used for short documents, one document per row, document numbers that reappear later
    in their row, devices other than the CPU, and under torch.compile.

    Args:
        documents: (B, S) int32 or None.
    """
    if torch.compiler.is_compiling():
        return None
    if documents is None or documents.device.type != "cpu" or not documents.numel():
        return None
    with unset_fake_temporarily():  # documents are real when memory is predicted
        lengths = packed_lengths(documents)
    # One document per row: plain causal attention needs no mask either.
    if lengths is None or len(lengths) == len(documents):
        return None
    return lengths if len(lengths) * MIN_MEAN_LENGTH <= documents.numel() else None
