"""Sums the expert rows of each token with weights, and restores the order of the tokens."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Work, indices
from ms_kernels.contracts.call import FLOATING, Dims, accumulator
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.indices import check_range, readable
from ms_kernels.errors import ArgumentError


def unpermute_tokens(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return ``Σ_c weights[t, c] · rows[places[t, c]]``, rounded once to the dtype of the rows."""
    tokens, choices = places.shape
    token_rows = rows.index_select(0, places.reshape(-1)).view(tokens, choices, rows.shape[-1])
    token_rows = token_rows.to(accumulator(rows.dtype))
    if weights is not None:
        token_rows = token_rows * weights.unsqueeze(-1)
    return token_rows.sum(1).to(rows.dtype)


def _rules(dims: Dims, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if dims["R"] != dims["T"] * dims["C"]:
        rows = dims["T"] * dims["C"]
        yield "rows", f"of a first size of {rows}, one per place"


def _draw(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    count = shape[0] * shape[1]
    # A permutation of the R = T * C rows.
    return torch.randperm(count, generator=generator).view(shape)


def _forward(dims: Dims, itemsize: int) -> Work:
    tokens = dims["T"] * dims["H"]
    # Per row 8 bytes of its place and 4 of its weight.
    size_bytes = (dims["R"] * dims["H"] + tokens) * itemsize + 12 * dims["R"]
    return Work(size_bytes, 2 * dims["R"] * dims["H"])


def _backward(dims: Dims, itemsize: int) -> Work:
    """Read the gradient and the rows; write the gradient of rows and one value per weight."""
    elements = 2 * dims["R"] * dims["H"] + dims["T"] * dims["H"]
    return Work(elements * itemsize + 16 * dims["R"], 3 * dims["R"] * dims["H"])


def _check_places(rows: Tensor, places: Tensor, weights: Tensor | None) -> None:
    """Reject out-of-range places, and rows referenced by more than one place."""
    if not readable(places):
        return
    count = rows.shape[0]
    check_range("unpermute_tokens", "places", places, count)
    references = torch.bincount(places.reshape(-1), minlength=count)
    duplicates = (references > 1).nonzero()
    if duplicates.numel():
        got = f"{duplicates[0].item()} more than once"
        raise ArgumentError("unpermute_tokens", "places", got, "each row once")


CONTRACT = Contract(
    name="unpermute_tokens",
    summary="each token's weighted sum of the rows at its places",
    arguments=(
        Argument(name="rows", dims="R H"),
        indices("places", "T C", _draw),
        Argument(name="weights", dims="T C", dtypes=FLOATING, optional=True),
    ),
    returns="(T H), dtype of rows",
    results={"result": "T H"},
    splits=("H",),
    positive="H C",
    rules=_rules,
    check_values=_check_places,
    forward=_forward,
    backward=_backward,
    example={"R": 128, "T": 64, "C": 2, "H": 32},
    reference=unpermute_tokens,
    ladders=(Ladder({"H": 512, "C": 1}, ("T", "R")),),
)
