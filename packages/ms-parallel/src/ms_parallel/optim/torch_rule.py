"""Updates by any torch optimizer, on local shards or on full tensors by an owning process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ms_parallel.errors import ConfigError
from ms_parallel.optim.optimizer import ParameterGroup
from ms_parallel.optim.rule import LocalParameters, Moments
from ms_parallel.split.owners import OwnerExchange
from ms_parallel.split.part import is_plain_tensor, local_part

Make = Callable[[Sequence[Tensor]], Optimizer]
"""Builds a torch optimizer over some tensors."""


class PreparedOptimizer:
    """A torch optimizer whose state exists before its first step.

    torch creates the state in the first step, but a checkpoint must be able to fill it earlier. The
    state is therefore created by stepping a dummy tensor, and dropped at the first update of a new
    run.

    Args:
        tensors: tensors to update, by name.
        make: builds the optimizer.
    """

    def __init__(self, tensors: Mapping[str, Tensor], make: Make) -> None:
        self.tensors = dict(tensors)
        self.optimizer = make(list(self.tensors.values())) if self.tensors else None
        for tensor in self.tensors.values():
            assert self.optimizer is not None
            self.optimizer.state[tensor] = _initial_state(tensor, make)

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Return the state tensors by state name, then by parameter name."""
        states: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            assert self.optimizer is not None
            for key, value in self.optimizer.state[tensor].items():
                if isinstance(value, Tensor):
                    states.setdefault(key, {})[name] = value
        return states

    def apply(
        self, gradients: Mapping[str, Tensor], rate: float, weight_decay: float, update_count: int
    ) -> None:
        """Update the tensors in place."""
        if self.optimizer is None:
            return
        if update_count == 0:
            self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for name, tensor in self.tensors.items():
            # Weight decay is decoupled for every optimizer, as in AdamW.
            tensor.mul_(1.0 - rate * weight_decay)
            tensor.grad = gradients[name]
        self.optimizer.step()
        self.optimizer.zero_grad()


def _initial_state(tensor: Tensor, make: Make) -> dict[str, Any]:
    """Return the state of an optimizer for a tensor after its first step.

    For a meta tensor a small stand-in is stepped, and its sizes are replaced by the tensor's.
    """
    if tensor.is_meta:
        # Distinct small sizes, so that each dim of a state can be traced to a dim of the tensor.
        sizes = tuple(range(2, 2 + tensor.ndim))
        return {
            key: value.new_empty(_scaled(value.shape, sizes, tensor.shape), device="meta")
            for key, value in _initial_state(torch.zeros(sizes, dtype=tensor.dtype), make).items()
            if isinstance(value, Tensor)
        }
    stand_in = torch.zeros_like(tensor)
    stand_in.grad = torch.zeros_like(tensor)
    optimizer = make([stand_in])
    optimizer.step()
    state: dict[str, Any] = optimizer.state[stand_in]
    return state


def _scaled(shape: Sequence[int], sizes: Sequence[int], full_shape: Sequence[int]) -> list[int]:
    """Replace the stand-in's sizes in the shape of a state tensor by the real ones."""
    pairs = zip(shape, sizes, full_shape, strict=False)
    return [long if size == short else size for size, short, long in pairs]


class PartsRule:
    """A torch optimizer on the local part of each parameter; elementwise if any is split.

    Args:
        params: all local parameters.
        group: parameter group to update.
        make: builds the optimizer.
        name: name of the optimizer for messages.

    Raises:
        ConfigError: a split parameter needs an elementwise optimizer, or the optimizer rejects a
            parameter's shape.
    """

    def __init__(
        self, params: LocalParameters, group: ParameterGroup, make: Make, name: str
    ) -> None:
        split = [
            param_name
            for param_name in group.names
            if not is_plain_tensor(params.parameters[param_name])
        ]
        if split and not is_elementwise(make):
            raise ConfigError(
                f"optimizer {name!r} is not elementwise and cannot update shards, and this layout"
                f" shards {split[0]}; use AdamW, SGD, Adafactor or Muon, or set data=1 and tensor=1"
            )
        self.group = group
        self.local = {
            param_name: local_part(params.parameters[param_name]) for param_name in group.names
        }
        try:
            self.prepared = PreparedOptimizer(self.local, make)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"optimizer {name!r} cannot update parameters such as {group.names[0]}: {reason}"
            ) from error

    @property
    def moments(self) -> Moments:
        """State with the parameter's local shape."""
        return self._states(like_parameter=True)

    @property
    def unsharded(self) -> Moments:
        """State with any other shape, such as step counts."""
        return self._states(like_parameter=False)

    def apply(self, gradients: Mapping[str, Tensor], rate: float, update_count: int) -> None:
        """Update the parameters in place."""
        rate *= self.group.rate
        self.prepared.apply(gradients, rate, self.group.weight_decay, update_count)

    def _states(self, *, like_parameter: bool) -> Moments:
        """Return the states that have, or do not have, the shape of their parameter."""
        states = {
            key: {
                name: tensor
                for name, tensor in tensors.items()
                if (tensor.shape == self.local[name].shape) is like_parameter
            }
            for key, tensors in self.prepared.states().items()
        }
        return {key: tensors for key, tensors in states.items() if tensors}


class OwnersRule:
    """A torch optimizer on full tensors, each gathered and updated by one owning process.

    Args:
        params: all local parameters.
        group: parameter group to update.
        make: builds the optimizer.
    """

    moments: Moments = {}  # noqa: RUF012 - always empty

    def __init__(self, params: LocalParameters, group: ParameterGroup, make: Make) -> None:
        self.group = group
        self.parameters = {name: params.parameters[name] for name in group.names}
        boxes = {
            (name, 0): tuple(slice(0, size) for size in parameter.shape)
            for name, parameter in self.parameters.items()
        }
        costs = {key: float(self.parameters[key[0]].numel()) for key in boxes}
        self.exchange = OwnerExchange(self.parameters, boxes, costs, params.groups)
        # Only to learn which tensors this process owns; `apply` copies current values.
        owned = self.exchange.gather(self._local())
        self.prepared = PreparedOptimizer(
            {name: tensor for (name, _), tensor in owned.items()}, make
        )

    @property
    def unsharded(self) -> Moments:
        """State of the weights that this process owns."""
        return self.prepared.states()

    def apply(self, gradients: Mapping[str, Tensor], rate: float, update_count: int) -> None:
        """Update the parameters in place."""
        local_gradients = {name: gradients[name] for name in self.parameters}
        weights, full_gradients = (
            self.exchange.gather(parts) for parts in (self._local(), local_gradients)
        )
        # The full copies are stale if a checkpoint was loaded into the shards.
        for (name, _), tensor in weights.items():
            self.prepared.tensors[name].copy_(tensor)
        self.prepared.apply(
            {name: gradient for (name, _), gradient in full_gradients.items()},
            rate * self.group.rate,
            self.group.weight_decay,
            update_count,
        )
        updated = {key: self.prepared.tensors[key[0]] for key in weights}
        local = self._local()
        for piece, values in self.exchange.scatter(updated, torch.float32):
            local[piece.key[0]][piece.of_part] = values

    def _local(self) -> dict[str, Tensor]:
        return {name: local_part(parameter) for name, parameter in self.parameters.items()}


def is_elementwise(make: Make) -> bool:
    """Whether slices of a tensor are updated like the full tensor; tested on a small one."""
    generator = torch.Generator().manual_seed(0)
    # (6, 4) each: a start and three gradients.
    start, *gradients = torch.randn(4, 6, 4, generator=generator).unbind()
    # Three blocks that tile the tensor, split by rows and by columns.
    parts = [(slice(0, 2), slice(None)), (slice(2, 6), slice(0, 1)), (slice(2, 6), slice(1, 4))]
    full = start.clone()
    tensors = [start[part].clone() for part in parts]
    optimizers = [make([full]), *(make([tensor]) for tensor in tensors)]
    for gradient in gradients:
        full.grad = gradient
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.grad = gradient[part].clone()
        for optimizer in optimizers:
            optimizer.step()
    # Kernels may round the last elements of a tensor differently.
    pairs = zip(tensors, parts, strict=True)
    return all(torch.allclose(tensor, full[part], rtol=1e-5, atol=1e-6) for tensor, part in pairs)
