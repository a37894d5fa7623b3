"""Cuts packed rows into their documents, so that attention reads no pair that it would mask.

Documents of length n need n² scores where their row of S needs S²: with rows of 512 that hold
documents of a hundred tokens, attention on a CPU takes half the time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ms_parallel.torch_private import unset_fake_temporarily

WORTH_IT = 64
"""Mean length of documents below which so many small calls cost more than one masked one."""


def document_lengths(documents: Tensor | None) -> tuple[int, ...] | None:
    """List the lengths of all rows' documents, row after row; None where masks are to be used.

    Args:
        documents: (B, S) int32 or None. A number that comes back later in its row, short
            documents, another device than the CPU, where looking would stall the queue, and
            torch.compile, whose graph looking would break, get None.
    """
    if torch.compiler.is_compiling():
        return None
    if documents is None or documents.device.type != "cpu" or not documents.numel():
        return None
    with unset_fake_temporarily():  # these numbers are known where memory is predicted too
        return _lengths(documents)


def _lengths(documents: Tensor) -> tuple[int, ...] | None:
    rows, positions = documents.shape
    begins = torch.ones(rows, positions, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    if len(starts) == rows or len(starts) * WORTH_IT > rows * positions:
        return None  # one document a row needs no mask either
    row = starts.div(positions, rounding_mode="floor")
    known = set(zip(row.tolist(), documents.flatten()[starts].tolist(), strict=True))
    if len(known) != len(starts):
        return None
    ends = torch.cat((starts[1:], starts.new_tensor([rows * positions])))
    return tuple((ends - starts).tolist())


def attend_in_spans(
    attention: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    **settings: Any,
) -> Tensor:
    """Compute causal attention of each document alone.

    Args:
        attention: the operator, as `ms_parallel.operators.attention`.
        q: (B, S, Hq, D).
        k: (B, S, Hk, D).
        v: (B, S, Hk, Dv).
        lengths: of the documents of all rows; their sum is B·S.
        settings: what else the operator takes.

    Returns:
        (B, S, Hq, Dv).
    """
    parts = (torch.split(x.flatten(0, 1)[None], list(lengths), 1) for x in (q, k, v))
    alone = [attention(*part, **settings) for part in zip(*parts, strict=True)]
    return torch.cat(alone, 1).view(*q.shape[:3], v.shape[3])
