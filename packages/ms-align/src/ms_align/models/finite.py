"""Checks that weights are finite; used wherever weights are read or written."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ms_align.errors import AlignError, ModelError


def check_tensors(
    where: str | Path, tensors: Mapping[str, Tensor], *, error: type[AlignError]
) -> None:
    """Check that the tensors of a file are finite.

    Raises:
        error: names the file and the first tensor that is not finite.
    """
    name = first_not_finite(tensors)
    if name is not None:
        raise error(
            f"{where}: {name!r} must be finite and contains an infinity or NaN; copy the file "
            "again or use an earlier one"
        )


def check_module(where: str | Path, module: nn.Module) -> nn.Module:
    """Check that the weights of a loaded module are finite, and return the module.

    Raises:
        ModelError: names the folder and the first weight that is not finite.
    """
    check_tensors(where, module.state_dict(), error=ModelError)
    return module


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with an infinity or NaN."""
    return next((name for name, tensor in tensors.items() if not is_finite(tensor)), None)


@torch.no_grad()
def is_finite(tensor: Tensor) -> bool:
    """Return True if this process's shard of a tensor has neither NaN nor infinity."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # Integers are always finite.
    return not local.is_floating_point() or bool(torch.isfinite(local).all())
