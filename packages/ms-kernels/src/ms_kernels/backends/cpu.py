"""torch's own operators on the CPU, arranged where that is faster or leaner than the reference."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ms_kernels.contracts.call import Call
from ms_kernels.contracts.contract import Contract
from ms_kernels.core.choice import Implementation

SMALL = 2**16
"""Elements below which Python's share of the time outweighs what is saved, where no table says."""

BLOCK_BYTES = 2**20
"""Bytes of one operand's block, at four an element: a few share a second-level cache."""


def blocks(rows: int, width: int) -> Iterator[slice]:
    """Yield the slices that cut `rows` rows of `width` elements into blocks.

    A chain of simple operations on one block finds its operands in the cache.
    """
    step = max(BLOCK_BYTES // (4 * max(width, 1)), 1)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _traced(call: Call) -> str | None:
    """Decline where the reference is faster: under inductor."""
    return "torch.compile fuses the reference by itself" if call.compiling else None


def on_cpu(
    contract: Contract,
    run: Callable[..., Any],
    merit: str,
    *,
    refuses: Callable[[Call], str | None] = _traced,
    dtypes: tuple[torch.dtype, ...] | None = None,
    pays_from: int = SMALL,
) -> Implementation:
    """Return an implementation for the CPU."""
    return Implementation(
        operator=contract.name,
        backend="cpu",
        run=run,
        devices=frozenset({"cpu"}),
        dtypes=dtypes,
        refuses=refuses,
        pays_from=pays_from,
        merit=merit,
    )
