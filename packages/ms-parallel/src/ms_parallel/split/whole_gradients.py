"""Unsharded local gradients of one backward pass, before the reduction over data ranks."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ms_parallel.torch_private import fsdp_parameters, gathered_weight


def take_gradients(stage: nn.Module, names: Mapping[int, str]) -> dict[str, Tensor]:
    """Detach the gradients of this process's tokens from the parameters.

    Args:
        stage: a stage whose backward pass skipped the reduction over the data axis.
        names: names of the requested parameters, by `id`.

    Returns:
        Gradients by parameter name, in the reduction dtype; parameters without one are left out.
    """
    gradients: dict[str, Tensor] = {}
    for parameter in stage.parameters():
        name = names.get(id(parameter))
        if name is not None and parameter.grad is not None:
            gradients[name], parameter.grad = parameter.grad, None
    for state in _fsdp_states(stage):
        name = names.get(id(state.sharded_param))
        gathered = gathered_weight(state)
        accumulated, state.unsharded_accumulated_grad = state.unsharded_accumulated_grad, None
        # FSDP2 accumulates earlier backward passes in the reduction dtype, and leaves the latest
        # gradient on the gathered weight.
        gradient = accumulated
        if gathered is not None and gathered.grad is not None:
            latest = (
                gathered.grad
                if state.reduce_dtype is None
                else gathered.grad.to(state.reduce_dtype)
            )
            gradient, gathered.grad = (
                latest if accumulated is None else accumulated.add_(latest),
                None,
            )
        if name is not None and gradient is not None:
            gradients[name] = gradient
    return gradients


def _fsdp_states(stage: nn.Module) -> Iterator[Any]:
    """Yield the FSDP state of each sharded parameter."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            yield from fsdp_parameters(module)
