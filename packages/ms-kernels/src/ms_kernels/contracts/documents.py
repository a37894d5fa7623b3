"""Document ids of packed rows: the operator argument, and the start of each document."""

import torch
from torch import Tensor

from ms_kernels.contracts.arguments import Argument
from ms_kernels.contracts.call import Dims


def documents_argument(dims: str) -> Argument:
    """Return the optional argument `documents`: the document id of each position."""
    return Argument(
        name="documents",
        dims=dims,
        dtypes=(torch.int32, torch.int64),
        optional=True,
        differentiable=False,
        draw=_draw,
    )


def starts_of(documents: Tensor) -> Tensor:
    """Return a mask (B, S) of positions whose document id differs from the previous position's."""
    starts = torch.zeros_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return starts


def _draw(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Draw documents of about 5 positions."""
    starts = torch.rand(shape, generator=generator) < 0.2
    return starts.to(torch.int32).cumsum(-1).to(torch.int32)
