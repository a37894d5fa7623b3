"""Updates by any optimizer of torch's, on this process's parts or by an owner on all of each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ms_parallel.engine.optimizer import ParameterGroup
from ms_parallel.engine.rules.rule import Held, Moments
from ms_parallel.errors import ConfigError
from ms_parallel.split.owners import OwnerExchange
from ms_parallel.split.part import is_whole_here, local_part

Make = Callable[[Sequence[Tensor]], Optimizer]
"""An optimizer of torch's over some tensors."""


class Kept:
    """An optimizer of torch's over tensors that it keeps state for, begun before its first step.

    Torch makes the state in the first step; a checkpoint fills it before that. So it is made by a
    step of a stand-in, and dropped again if it was not filled.

    Args:
        tensors: what is updated, by name.
        make: the optimizer.
    """

    def __init__(self, tensors: Mapping[str, Tensor], make: Make) -> None:
        self.tensors = dict(tensors)
        self.optimizer = make(list(self.tensors.values())) if self.tensors else None
        for tensor in self.tensors.values():
            assert self.optimizer is not None
            self.optimizer.state[tensor] = _begun(tensor, make)

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Collect each tensor of the state, by its name and its parameter's."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            assert self.optimizer is not None
            for key, value in self.optimizer.state[tensor].items():
                if isinstance(value, Tensor):
                    found.setdefault(key, {})[name] = value
        return found

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
    """Build the state that an optimizer has of a tensor after its first step.

    Of a tensor without memory it is that of a small one, whose sizes stand for the tensor's.
    """
    if tensor.is_meta:
        sizes = tuple(range(2, 2 + tensor.ndim))
        return {
            key: value.new_empty(_scaled(value.shape, sizes, tensor.shape), device="meta")
            for key, value in _begun(torch.zeros(sizes, dtype=tensor.dtype), make).items()
            if isinstance(value, Tensor)
        }
    other = torch.zeros_like(tensor)
    other.grad = torch.zeros_like(tensor)
    optimizer = make([other])
    optimizer.step()
    state: dict[str, Any] = optimizer.state[other]
    return state


def _scaled(shape: Sequence[int], sizes: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Put sizes of `whole` in place of those of `sizes` in a shape made of these and ones."""
    pairs = zip(shape, sizes, whole, strict=False)
    return [long if size == short else size for size, short, long in pairs]


class PartsRule:
    """An elementwise optimizer of torch's on the local part of each parameter.

    Args:
        held: all parameters.
        share: those that are updated.
        make: the optimizer.
        name: its name, for messages.

    Raises:
        ConfigError: a parameter is split or of a shape that the optimizer does not take.
    """

    def __init__(self, held: Held, share: ParameterGroup, make: Make, name: str) -> None:
        split = [own for own in share.names if not is_whole_here(held.parameters[own])]
        if split and not is_elementwise(make):
            raise ConfigError(
                f"optimizer {name!r} is not elementwise and would be wrong on the parts of"
                f" {split[0]} that this layout makes; choose AdamW, SGD, Adafactor or Muon, or"
                " leave data and tensor at 1"
            )
        self.share = share
        self.local = {own: local_part(held.parameters[own]) for own in share.names}
        try:
            self.kept = Kept(self.local, make)
        except (TypeError, ValueError, RuntimeError) as error:
            said = str(error).splitlines()[0]
            raise ConfigError(
                f"optimizer {name!r} cannot update all of {share.names[0]} and the like: {said}"
            ) from error

    @property
    def moments(self) -> Moments:
        """What has the shape of the parameter."""
        return self._states(beside=True)

    @property
    def whole(self) -> Moments:
        """The rest, such as counts of steps."""
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
    """An optimizer of torch's that needs whole tensors, each updated by one process that owns it.

    Args:
        held: all parameters.
        share: those that are updated.
        make: the optimizer.
    """

    moments: Moments = {}  # noqa: RUF012 - there are none, and none is added

    def __init__(self, held: Held, share: ParameterGroup, make: Make) -> None:
        self.share = share
        self.parameters = {name: held.parameters[name] for name in share.names}
        boxes = {
            (name, 0): tuple(slice(0, size) for size in parameter.shape)
            for name, parameter in self.parameters.items()
        }
        costs = {key: float(self.parameters[key[0]].numel()) for key in boxes}
        self.exchange = OwnerExchange(self.parameters, boxes, costs, held.groups)
        mine = self.exchange.gather(self._local())
        self.kept = Kept({name: tensor for (name, _), tensor in mine.items()}, make)

    @property
    def whole(self) -> Moments:
        """What the owner keeps."""
        return self.kept.states()

    def apply(self, gradients: Mapping[str, Tensor], rate: float, taken: int) -> None:
        """Update the parameters in place."""
        chosen = {name: gradients[name] for name in self.parameters}
        weights, slopes = (self.exchange.gather(each) for each in (self._local(), chosen))
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
    """Return whether parts of a tensor are updated as the whole is, tried on a few numbers."""
    draw = torch.Generator().manual_seed(0)
    start, *slopes = torch.randn(4, 6, 4, generator=draw).unbind()
    parts = [(slice(0, 2), slice(None)), (slice(2, 6), slice(0, 1)), (slice(2, 6), slice(1, 4))]
    whole = start.clone()
    tensors = [start[part].clone() for part in parts]
    made = [make([whole]), *(make([tensor]) for tensor in tensors)]
    for slope in slopes:
        whole.grad = slope
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.grad = slope[part].clone()
        for optimizer in made:
            optimizer.step()
    # Kernels may round the last elements of a tensor otherwise than those before.
    found = zip(tensors, parts, strict=True)
    return all(torch.allclose(tensor, whole[part], rtol=1e-5, atol=1e-6) for tensor, part in found)
