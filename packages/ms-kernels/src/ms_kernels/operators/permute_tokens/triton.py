"""Tokens sorted by expert, and rows summed by token; forward and backward are gathers.

The permutation is known in both directions, so gradients are gathered and summed, where indexing in
plain torch would add atomically.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ms_kernels.backends.triton.configuration import WALK_DEFAULTS, WALKS, row_blocks, tuned_kernels
from ms_kernels.backends.triton.implementation import on_gpu
from ms_kernels.backends.triton.launching import blocks, launch
from ms_kernels.backends.triton.rows import with_unit_stride
from ms_kernels.core.entries import DTYPES, Entry, entry
from ms_kernels.core.launches import TableKey, TunedKernel, key_of
from ms_kernels.operators.permute_tokens.contract import CONTRACT

GATHER, SUM = TUNED = tuned_kernels(
    "permute_tokens",
    "gather_rows sum_choices",
    sizes="H",
    tried_at=({"T": 16384, "C": 2, "H": 4096},),
    candidates=WALKS,
    defaults=WALK_DEFAULTS,
)
GATHER_ROWS, SUM_CHOICES = (f"{__package__}.kernels.{kernel.name}" for kernel in TUNED)


def _gather(x: Tensor, order: Tensor, choices: int, out: Tensor) -> None:
    """Copy row ``order[r] // choices`` of x to row r of `out`."""
    constants = row_blocks(GATHER, key_of(x), x.shape[1])
    tiles = len(order) * blocks(x.shape[1], constants["BLOCK"])
    sizes = (len(order), choices, x.shape[1], x.stride(0))
    launch(GATHER_ROWS, tiles, x, x, order, out, *sizes, **constants)


def sum_choices(
    kernel: TunedKernel, rows: Tensor, places: Tensor, weights: Tensor | None, out: Tensor
) -> None:
    """Write the weighted sum of each token's rows to `out`."""
    rows = with_unit_stride(rows)
    constants = row_blocks(kernel, key_of(rows), rows.shape[1])
    launch(
        SUM_CHOICES,
        len(places) * blocks(rows.shape[1], constants["BLOCK"]),
        rows,
        *(rows, places.contiguous(), rows if weights is None else weights.contiguous(), out),
        *(len(rows), places.shape[1], rows.shape[1], rows.stride(0)),
        WEIGHTED=weights is not None,
        **constants,
    )


def _forward(x: Tensor, experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.new_empty((experts.numel(), x.shape[1]))
    # Out-of-range experts are sorted last and in no count; `grouped_matmul` makes their rows NaN.
    flat = experts.reshape(-1).to(torch.int64)
    flat = flat.masked_fill((flat < 0) | (flat >= count), count)
    order = flat.argsort(stable=True)
    _gather(with_unit_stride(x), order, experts.shape[1], rows)
    counts = flat.new_zeros(count + 1).scatter_add_(0, flat, torch.ones_like(flat))[:count]
    # Invert the permutation by a scatter instead of a second sort.
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return rows, counts, places.view(experts.shape)


def _fake(x: Tensor, experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.new_empty((experts.shape[0] * experts.shape[1], x.shape[1]))
    counts, places = (x.new_empty(size, dtype=torch.int64) for size in (count, experts.shape))
    return rows, counts, places


def _backward(
    grad: Tensor,
    grad_counts: Tensor | None,
    grad_places: Tensor | None,
    places: Tensor,
    grad_mask: int,
    count: int,
) -> Tensor:
    result = grad.new_empty((len(places), grad.shape[1]))
    # The gradient of a copied row is the sum over its copies.
    sum_choices(SUM, grad, places, None, result)
    return result


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time library."""
    gather = row_blocks(GATHER, TableKey(chip, DTYPES[dtype]), 4096)
    tiles = "rows * cdiv(width, BLOCK)"
    yield entry("permute_tokens", GATHER_ROWS, dtype, "", gather, tiles, i64="ORDER")


IMPLEMENTATION = on_gpu(
    CONTRACT,
    "gathers both ways, where plain torch adds atomically",
    tuned=TUNED,
    entries=entries,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    saves=("places",),
)
