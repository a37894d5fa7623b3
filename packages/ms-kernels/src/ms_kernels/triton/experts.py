"""Tokens to experts and back, and each expert's product, without waiting for the counts.

Gradients are gathered and summed where a plain index would add atomically: a row's place is known
from both sides.
"""

import torch
from torch import Tensor

from ms_kernels.library import is_wanted, opaque, unwanted
from ms_kernels.reference import CONTRACTS
from ms_kernels.triton import configuration
from ms_kernels.triton.launching import blocks, launch, power_of_two
from ms_kernels.triton.rows import empty, with_unit_stride

__all__ = ["grouped_matmul", "permute_tokens", "unpermute_tokens"]


def _walk(operator: str, kernel: str, rows: Tensor) -> dict[str, int]:
    place = configuration.place_of(rows)
    return configuration.row_blocks(operator, kernel, place, H=rows.shape[1])


def _gather(x: Tensor, order: Tensor, choices: int, out: Tensor) -> None:
    """Put row ``order[r] // choices`` of x into row r of `out`."""
    constants = _walk("permute_tokens", "gather_rows", x)
    tiles = len(order) * blocks(x.shape[1], constants["BLOCK"])
    sizes = (len(order), choices, x.shape[1], x.stride(0))
    launch("experts.gather_rows", tiles, x, x, order, out, *sizes, **constants)


def _sum(operator: str, rows: Tensor, places: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """Put the weighted sums of each token's rows into `out`."""
    rows = with_unit_stride(rows)
    constants = _walk(operator, "sum_choices", rows)
    launch(
        "experts.sum_choices",
        len(places) * blocks(rows.shape[1], constants["BLOCK"]),
        rows,
        *(rows, places.contiguous(), rows if weights is None else weights.contiguous(), out),
        *(len(rows), places.shape[1], rows.shape[1], rows.stride(0)),
        WEIGHTED=weights is not None,
        **constants,
    )


def _permute(x: Tensor, experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = _permute_fake(x, experts, count)[0]
    # A choice that is no expert is counted by none and comes last: `grouped_matmul` makes it NaN.
    flat = experts.reshape(-1).to(torch.int64)
    flat = flat.masked_fill((flat < 0) | (flat >= count), count)
    order = flat.argsort(stable=True)
    _gather(with_unit_stride(x), order, experts.shape[1], rows)
    counts = flat.new_zeros(count + 1).scatter_add_(0, flat, torch.ones_like(flat))[:count]
    # The inverse of a permutation is written, not sorted for.
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return rows, counts, places.view(experts.shape)


def _permute_fake(x: Tensor, experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.new_empty((experts.shape[0] * experts.shape[1], x.shape[1]))
    return rows, rows.new_empty(count, dtype=torch.int64), empty(experts, torch.int64)


def _permute_backward(
    grad: Tensor,
    grad_counts: Tensor | None,
    grad_places: Tensor | None,
    places: Tensor,
    wanted: int,
    count: int,
) -> Tensor:
    result = grad.new_empty((len(places), grad.shape[1]))
    _sum("permute_tokens", grad, places, None, result)
    return result


def _permute_fake_backward(
    grad: Tensor,
    grad_counts: Tensor | None,
    grad_places: Tensor | None,
    places: Tensor,
    wanted: int,
    count: int,
) -> Tensor:
    return grad.new_empty((places.shape[0], grad.shape[1]))


permute_tokens = opaque(
    CONTRACTS["permute_tokens"],
    "triton",
    forward=_permute,
    fake=_permute_fake,
    backward=_permute_backward,
    fake_backward=_permute_fake_backward,
    saves=("places",),
)


def _unpermute(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    result = _unpermute_fake(rows, places, weights)
    _sum("unpermute_tokens", rows, places, weights, result)
    return result


def _unpermute_fake(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty((places.shape[0], rows.shape[1]))


def _unpermute_backward(
    grad: Tensor, rows: Tensor, places: Tensor, weights: Tensor | None, wanted: int
) -> tuple[Tensor, Tensor]:
    rows = with_unit_stride(rows)
    grad_rows, grad_weights = empty(rows), grad.new_empty(0)
    if weights is not None:
        grad_weights = empty(weights)
        weights = weights.contiguous()
    launch(
        "experts.spread_choice",
        places.numel(),
        rows,
        *(grad, rows, places.contiguous(), grad if weights is None else weights),
        *(grad_rows, grad_weights, len(rows), places.shape[1], rows.shape[1]),
        *(grad.stride(0), rows.stride(0)),
        WEIGHTED=weights is not None,
        **_walk("unpermute_tokens", "spread_choice", rows),
    )
    return (
        grad_rows if is_wanted(wanted, 0) else unwanted(rows),
        grad_weights if is_wanted(wanted, 1) else _no_weights(rows, weights),
    )


def _no_weights(rows: Tensor, weights: Tensor | None) -> Tensor:
    return unwanted(rows if weights is None else weights)


def _unpermute_fake_backward(
    grad: Tensor, rows: Tensor, places: Tensor, weights: Tensor | None, wanted: int
) -> tuple[Tensor, Tensor]:
    of_weights = weights is not None and is_wanted(wanted, 1)
    return (
        empty(rows) if is_wanted(wanted, 0) else unwanted(rows),
        empty(weights) if weights is not None and of_weights else _no_weights(rows, weights),
    )


unpermute_tokens = opaque(
    CONTRACTS["unpermute_tokens"],
    "triton",
    forward=_unpermute,
    fake=_unpermute_fake,
    backward=_unpermute_backward,
    fake_backward=_unpermute_fake_backward,
    saves=("rows", "places", "weights"),
)


def _multiply(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return _by_expert(x, weights, counts.cumsum(0).to(torch.int32))


def _multiply_fake(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weights.shape[2]))


def _multiply_backward(
    grad: Tensor, x: Tensor, weights: Tensor, counts: Tensor, wanted: int
) -> tuple[Tensor, Tensor]:
    ends = counts.cumsum(0).to(torch.int32)
    grad_x, grad_weights = unwanted(x), unwanted(weights)
    if is_wanted(wanted, 0):
        grad_x = _by_expert(grad, weights.transpose(1, 2), ends)
    if is_wanted(wanted, 1):
        grad_weights, x = empty(weights), with_unit_stride(x)
        place = configuration.place_of(x)
        constants = configuration.fixed("grouped_matmul", "grouped_weights", place)
        experts, width, out_width = weights.shape
        tiles = experts * blocks(width, constants["BK"]) * blocks(out_width, constants["BN"])
        sizes = (len(x), width, out_width, x.stride(0), grad.stride(0))
        launch(
            "experts.grouped_weights", tiles, x, x, grad, ends, grad_weights, *sizes, **constants
        )
    return grad_x, grad_weights


def _by_expert(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows (T, K) by their experts' matrices (E, K, N) under any strides."""
    x = with_unit_stride(x)
    experts, width, out_width = weights.shape
    result = x.new_empty((len(x), out_width))
    place = configuration.place_of(x)
    constants = configuration.tile("grouped_matmul", "grouped_rows", place, len(x))
    launch(
        "experts.grouped_rows",
        (blocks(len(x), constants["BM"]) + experts) * blocks(out_width, constants["BN"]),
        x,
        *(x, weights, ends, result, len(x), experts, width, out_width),
        *(x.stride(0), *weights.stride()),
        EXPERTS=power_of_two(experts),
        **constants,
    )
    return result


grouped_matmul = opaque(
    CONTRACTS["grouped_matmul"],
    "triton",
    forward=_multiply,
    fake=_multiply_fake,
    backward=_multiply_backward,
    saves=("x", "weights", "counts"),
)
