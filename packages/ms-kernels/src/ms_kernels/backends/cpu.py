"""Shared code of the CPU implementations, built on torch's operators.

They are used where they are faster or need less memory than the reference.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ms_kernels.contracts.call import Call
from ms_kernels.contracts.contract import Contract
from ms_kernels.core.choice import Implementation

SMALL = 2**16
"""Default minimum number of elements, if no tuning table has one.

Below it Python overhead outweighs the savings.
"""

BLOCK_BYTES = 2**20
"""Size of one operand's block, at 4 bytes per element: a few blocks fit in the L2 cache."""


def blocks(rows: int, width: int) -> Iterator[slice]:
    """Yield slices that split `rows` rows of `width` elements into cache-sized blocks.

    A chain of element-wise operations on one block finds its operands in the cache.
    """
    step = max(BLOCK_BYTES // (4 * max(width, 1)), 1)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _traced(call: Call) -> str | None:
    """Decline under torch.compile, where inductor makes the reference faster."""
    return "torch.compile fuses the reference itself" if call.compiling else None


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
