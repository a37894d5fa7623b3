"""Updates by any torch optimizer, on local parts or on whole tensors by an owning process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ms_parallel.engine.optimizer import ParameterGroup
from ms_parallel.engine.rules.rule import Held, Moments
from ms_parallel.errors import ConfigError
from ms_parallel.split.owners import OwnerExchange
from ms_parallel.split.part import is_plain_tensor, local_part

Make = Callable[[Sequence[Tensor]], Optimizer]
"""Builds a torch optimizer over some tensors."""


class Kept:
    """A torch optimizer whose state exists before its first step.

    torch creates the state in the first step, but a checkpoint has to fill it earlier. The state is
    therefore created by stepping a stand-in, and dropped at the first update of a new run.

    Args:
        tensors: tensors to update, by name.
        make: builds the optimizer.
    """

    def __init__(self, tensors: Mapping[str, Tensor], make: Make) -> None:
        self.tensors = dict(tensors)
        self.optimizer = make(list(self.tensors.values())) if self.tensors else None
        for tensor in self.tensors.values():
            assert self.optimizer is not None
            self.optimizer.state[tensor] = _begun(tensor, make)

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
        self, gradients: Mapping[str, Tensor], rate: float, weight_decay: float, taken: int
    ) -> None:
        """Update the tensors in place."""
        if self.optimizer is None:
            return
        if taken == 0:
            self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for name, tensor in self.tensors.items():
            tensor.mul_(1.0 - rate * weight_decay)
            tensor.grad = gradients[name]
        self.optimizer.step()
        self.optimizer.zero_grad()


def _begun(tensor: Tensor, make: Make) -> dict[str, Any]:
    """Return the state of an optimizer for a tensor after its first step.

    For a meta tensor a small stand-in is stepped, and its sizes are replaced by the tensor's.
    """
    if tensor.is_meta:
        sizes = tuple(range(2, 2 + tensor.ndim))
        return {
            key: value.new_empty(_scaled(value.shape, sizes, tensor.shape), device="meta")
            for key, value in _begun(torch.zeros(sizes, dtype=tensor.dtype), make).items()
            if isinstance(value, Tensor)
        }
    stand_in = torch.zeros_like(tensor)
    stand_in.grad = torch.zeros_like(tensor)
    optimizer = make([stand_in])
    optimizer.step()
    state: dict[str, Any] = optimizer.state[stand_in]
    return state


def _scaled(shape: Sequence[int], sizes: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Replace the stand-in's sizes in the shape of a state tensor by the real ones."""
    pairs = zip(shape, sizes, whole, strict=False)
    return [long if size == short else size for size, short, long in pairs]


class PartsRule:
    """A torch optimizer on the local part of each parameter; elementwise if any is split.

    Args:
        held: all local parameters.
        share: parameter group to update.
        make: builds the optimizer.
        name: name of the optimizer for messages.

    Raises:
        ConfigError: a split parameter needs an elementwise optimizer, or the optimizer rejects a
            parameter's shape.
    """

    def __init__(self, held: Held, share: ParameterGroup, make: Make, name: str) -> None:
        split = [
            param_name
            for param_name in share.names
            if not is_plain_tensor(held.parameters[param_name])
        ]
        if split and not is_elementwise(make):
            raise ConfigError(
                f"optimizer {name!r} is not elementwise and would be wrong on the parts of"
                f" {split[0]} that this layout makes; choose AdamW, SGD, Adafactor or Muon, or"
                " leave data and tensor at 1"
            )
        self.share = share
        self.local = {
            param_name: local_part(held.parameters[param_name]) for param_name in share.names
        }
        try:
            self.kept = Kept(self.local, make)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"optimizer {name!r} cannot update all of {share.names[0]} and the like: {reason}"
            ) from error

    @property
    def moments(self) -> Moments:
        """State with the parameter's local shape."""
        return self._states(beside=True)

    @property
    def whole(self) -> Moments:
        """State of other shapes, such as step counts."""
        return self._states(beside=False)

    def apply(self, gradients: Mapping[str, Tensor], rate: float, taken: int) -> None:
        """Update the parameters in place."""
        rate *= self.share.rate
        self.kept.apply(gradients, rate, self.share.weight_decay, taken)

    def _states(self, *, beside: bool) -> Moments:
        return {
            key: chosen
            for key, tensors in self.kept.states().items()
            if (
                chosen := {
                    name: tensor
                    for name, tensor in tensors.items()
                    if (tensor.shape == self.local[name].shape) is beside
                }
            )
        }


class OwnersRule:
    """A torch optimizer that needs whole tensors, each updated by one owning process.

    Args:
        held: all local parameters.
        share: parameter group to update.
        make: builds the optimizer.
    """

    moments: Moments = {}  # noqa: RUF012 - always empty

    def __init__(self, held: Held, share: ParameterGroup, make: Make) -> None:
        self.share = share
        self.parameters = {name: held.parameters[name] for name in share.names}
        boxes = {
            (name, 0): tuple(slice(0, size) for size in parameter.shape)
            for name, parameter in self.parameters.items()
        }
        costs = {key: float(self.parameters[key[0]].numel()) for key in boxes}
        self.exchange = OwnerExchange(self.parameters, boxes, costs, held.groups)
        owned = self.exchange.gather(self._local())
        self.kept = Kept({name: tensor for (name, _), tensor in owned.items()}, make)

    @property
    def whole(self) -> Moments:
        """State of the weights that this process owns."""
        return self.kept.states()

    def apply(self, gradients: Mapping[str, Tensor], rate: float, taken: int) -> None:
        """Update the parameters in place."""
        local_gradients = {name: gradients[name] for name in self.parameters}
        weights, slopes = (
            self.exchange.gather(parts) for parts in (self._local(), local_gradients)
        )
        for (name, _), tensor in weights.items():
            self.kept.tensors[name].copy_(tensor)
        self.kept.apply(
            {name: slope for (name, _), slope in slopes.items()},
            rate * self.share.rate,
            self.share.weight_decay,
            taken,
        )
        updated = {key: self.kept.tensors[key[0]] for key in weights}
        local = self._local()
        for piece, values in self.exchange.scatter(updated, torch.float32):
            local[piece.key[0]][piece.of_part] = values

    def _local(self) -> dict[str, Tensor]:
        return {name: local_part(parameter) for name, parameter in self.parameters.items()}


def is_elementwise(make: Make) -> bool:
    """Return whether slices of a tensor are updated like the whole tensor, by a small trial."""
    draw = torch.Generator().manual_seed(0)
    start, *slopes = torch.randn(4, 6, 4, generator=draw).unbind()
    parts = [(slice(0, 2), slice(None)), (slice(2, 6), slice(0, 1)), (slice(2, 6), slice(1, 4))]
    full = start.clone()
    tensors = [start[part].clone() for part in parts]
    optimizers = [make([full]), *(make([tensor]) for tensor in tensors)]
    for slope in slopes:
        full.grad = slope
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.grad = slope[part].clone()
        for optimizer in optimizers:
            optimizer.step()
    # Kernels may round the last elements of a tensor differently.
    pairs = zip(tensors, parts, strict=True)
    return all(torch.allclose(tensor, full[part], rtol=1e-5, atol=1e-6) for tensor, part in pairs)
