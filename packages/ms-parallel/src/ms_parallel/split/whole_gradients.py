"""Full local gradients of one backward pass, before any reduction over processes."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ms_parallel.torch_private import fsdp_parameters, gathered_weight


def take_gradients(stage: nn.Module, names: Mapping[int, str]) -> dict[str, Tensor]:
    """Take from each parameter its gradient of this process's tokens alone.

    Args:
        stage: whose backward was told not to sum over the data axis.
        names: of the parameters that are wanted, by `id`.

    Returns:
        By name, those that some gradient has reached, in the precision that sums have.
    """
    found: dict[str, Tensor] = {}
    for parameter in stage.parameters():
        name = names.get(id(parameter))
        if name is not None and parameter.grad is not None:
            found[name], parameter.grad = parameter.grad, None
    for held in _sharded(stage):
        name = names.get(id(held.sharded_param))
        whole = gathered_weight(held)
        summed, held.unsharded_accumulated_grad = held.unsharded_accumulated_grad, None
        gradient = summed
        if whole is not None and whole.grad is not None:
            late = whole.grad if held.reduce_dtype is None else whole.grad.to(held.reduce_dtype)
            gradient, whole.grad = late if summed is None else summed.add_(late), None
        if name is not None and gradient is not None:
            found[name] = gradient
    return found


def _sharded(stage: nn.Module) -> Iterator[Any]:
    """Yield FSDP's state of each sharded parameter."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            yield from fsdp_parameters(module)
