"""The documents of packed rows: the argument, and where each begins."""

import torch
from torch import Tensor

from ms_kernels.contracts.arguments import Argument
from ms_kernels.contracts.call import Dims


def documents_argument(dims: str) -> Argument:
    """Return the argument that numbers the document of each position."""
    return Argument(
        name="documents",
        dims=dims,
        dtypes=(torch.int32, torch.int64),
        optional=True,
        differentiable=False,
        draw=_draw,
    )


def starts_of(documents: Tensor) -> Tensor:
    """Return where a number differs from the one before, bool (B, S); never the first position."""
    starts = torch.zeros_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return starts


def _draw(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Draw documents of about 5 positions."""
    starts = torch.rand(shape, generator=generator) < 0.2
    return starts.to(torch.int32).cumsum(-1).to(torch.int32)
