"""Rows sorted by the experts of their tokens, so that the rows of an expert are consecutive."""

import torch
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Option, Work, indices
from ms_kernels.contracts.call import Dims
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.indices import check_range
from ms_kernels.contracts.values import is_integer

EXAMPLE_COUNT = 4
"""Number of experts in the example."""


def permute_tokens(
    x: Tensor, experts: Tensor, count: int = EXAMPLE_COUNT
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows sorted by expert, rows per expert, and the row index of each choice."""
    tokens, choices = experts.shape
    flat = experts.reshape(-1).to(torch.int64)
    order = flat.argsort(stable=True)  # row -> token * C + choice
    counts = flat.new_zeros(count).scatter_add(0, flat, torch.ones_like(flat))
    places = order.argsort().view(tokens, choices)
    return x.index_select(0, order // choices), counts, places


def _draw(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Draw random experts; the last one gets no tokens."""
    return torch.randint(EXAMPLE_COUNT - 1, shape, generator=generator)


def _work(dims: Dims, itemsize: int) -> Work:
    """Read each token once and write it once per choice; backward reads the rows and sums them."""
    rows = dims["T"] * dims["C"]
    return Work((dims["T"] + rows) * dims["H"] * itemsize + 16 * rows, rows * dims["H"])


CONTRACT = Contract(
    name="permute_tokens",
    summary="rows of x sorted by the experts that their tokens chose",
    arguments=(
        Argument(name="x", dims="T H"),
        indices("experts", "T C", _draw),
    ),
    options=(
        Option(
            name="count",
            default=EXAMPLE_COUNT,
            holds=lambda value: is_integer(value, 1, 2**31 - 1),
            fits="an integer of at least 1",
            trials=(7,),
        ),
    ),
    returns="rows (T·C H), dtype of x; counts (count) int64; places (T C) int64",
    results={"rows": "R H", "counts": "E", "places": "T C"},
    positive="H C",
    explain_error=lambda x, experts, count: check_range(
        "permute_tokens", "experts", experts, count
    ),
    forward=_work,
    backward=_work,
    example={"T": 64, "C": 2, "H": 32},
    reference=permute_tokens,
    ladders=(Ladder({"H": 512, "C": 2}, ("T",)),),
)
