"""A check that weights hold neither NaN nor infinity, wherever they are read from."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ms_align.errors import AlignError, ModelError


def check_tensors(
    where: str | Path, tensors: Mapping[str, Tensor], *, error: type[AlignError]
) -> None:
    """Refuse tensors of a file that are not finite.

    Raises:
        error: names the file and the first tensor that is not.
    """
    name = first_not_finite(tensors)
    if name is not None:
        raise error(
            f"{where}: {name!r} must be finite and holds an infinity or NaN; copy the file again, "
            "or take an earlier one"
        )


def check_module(where: str | Path, module: nn.Module) -> nn.Module:
    """Return a module that was read from a folder, and refuse weights that are not finite.

    Raises:
        ModelError: names the folder and the first weight that is not.
    """
    check_tensors(where, module.state_dict(), error=ModelError)
    return module


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Find the name of the first tensor that holds an infinity or NaN."""
    return next((name for name, tensor in tensors.items() if not is_finite(tensor)), None)


@torch.no_grad()
def is_finite(tensor: Tensor) -> bool:
    """Return whether this process's part of a tensor holds neither NaN nor infinity."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return not part.is_floating_point() or bool(torch.isfinite(part).all())
