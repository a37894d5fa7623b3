"""Weighted sums of each token's rows, and the gradients of rows and weights."""

from collections.abc import Iterator

from torch import Tensor

from ms_kernels.backends.triton.configuration import WALK_DEFAULTS, WALKS, row_blocks, tuned_kernels
from ms_kernels.backends.triton.implementation import on_gpu
from ms_kernels.backends.triton.launching import launch
from ms_kernels.backends.triton.rows import empty, with_unit_stride
from ms_kernels.core.entries import DTYPES, Entry, entry
from ms_kernels.core.launches import TableKey, key_of
from ms_kernels.core.plan import absent_grad, needs_grad
from ms_kernels.operators.permute_tokens.triton import SUM_CHOICES, sum_choices
from ms_kernels.operators.unpermute_tokens.contract import CONTRACT

SUM, SCATTER = TUNED = tuned_kernels(
    "unpermute_tokens",
    "sum_choices scatter_choice",
    sizes="H",
    tried_at=({"R": 32768, "T": 16384, "C": 2, "H": 4096},),
    candidates=WALKS,
    defaults=WALK_DEFAULTS,
)
SPREAD_CHOICE = f"{__package__}.kernels.scatter_choice"


def _forward(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    result = rows.new_empty((places.shape[0], rows.shape[1]))
    sum_choices(SUM, rows, places, weights, result)
    return result


def _backward(
    grad: Tensor, rows: Tensor, places: Tensor, weights: Tensor | None, grad_mask: int
) -> tuple[Tensor, Tensor]:
    rows = with_unit_stride(rows)
    grad_rows, grad_weights = empty(rows), grad.new_empty(0)
    if weights is not None:
        grad_weights = empty(weights)
        weights = weights.contiguous()
    launch(
        SPREAD_CHOICE,
        places.numel(),
        rows,
        *(grad, rows, places.contiguous(), grad if weights is None else weights),
        *(grad_rows, grad_weights, len(rows), places.shape[1], rows.shape[1]),
        *(grad.stride(0), rows.stride(0)),
        WEIGHTED=weights is not None,
        **row_blocks(SCATTER, key_of(rows), rows.shape[1]),
    )
    return (
        grad_rows if needs_grad(grad_mask, 0) else absent_grad(rows),
        grad_weights
        if needs_grad(grad_mask, 1)
        else absent_grad(rows if weights is None else weights),
    )


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time library."""
    for weighted in (False, True):
        for kernel, name, tiles in (
            (SUM, SUM_CHOICES, "tokens * cdiv(width, BLOCK)"),
            (SCATTER, SPREAD_CHOICE, "tokens * choices"),
        ):
            constants = row_blocks(kernel, TableKey(chip, DTYPES[dtype]), 4096)
            yield entry(
                "unpermute_tokens",
                name,
                dtype,
                "weighted" * weighted,
                {**constants, "WEIGHTED": weighted},
                tiles,
                fp32="W DW",
                i64="PLACES",
                extra=("tokens",),
            )


IMPLEMENTATION = on_gpu(
    CONTRACT,
    "weights and sums in one pass; gradients without atomic additions",
    tuned=TUNED,
    entries=entries,
    forward=_forward,
    backward=_backward,
    saves=("rows", "places", "weights"),
)
