"""The arguments and results of a backend's two torch operators, in order, and what follows.

The forward operator takes the contract's arguments and options, and returns results and kept
tensors; the backward one takes the results' gradients, saved tensors, which gradients are wanted,
and the options.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.contracts.call import accumulator
from ms_kernels.contracts.contract import Contract

DimNames = tuple[str, ...]
"""Symbols of a tensor's sizes, ``"..."`` first if at all."""


def is_wanted(wanted: int, place: int) -> bool:
    """Return whether the gradient of the differentiable argument at `place` is wanted."""
    return bool(wanted >> place & 1)


def unwanted(like: Tensor) -> Tensor:
    """Return the empty tensor that stands for a gradient that is not wanted."""
    return like.new_empty((0,) * like.ndim)


@frozen(kw_only=True, eq=False)
class Plan:
    """Which tensor stands where, in the forward operator's results and the backward's arguments."""

    contract: Contract
    kept: dict[str, str]
    saves: tuple[str, ...]
    arguments: tuple[str, ...] = field(init=False)
    outputs: tuple[str, ...] = field(init=False)
    differentiable: tuple[int, ...] = field(init=False)
    """Places of the arguments that have a gradient."""
    dims: dict[str, DimNames] = field(init=False)
    """Dims of every tensor, by name."""

    @arguments.default
    def _arguments(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.contract.arguments)

    @outputs.default
    def _outputs(self) -> tuple[str, ...]:
        return (*self.contract.results, *self.kept)

    @differentiable.default
    def _differentiable(self) -> tuple[int, ...]:
        arguments = enumerate(self.contract.arguments)
        return tuple(place for place, argument in arguments if argument.differentiable)

    @dims.default
    def _dims(self) -> dict[str, DimNames]:
        named = {argument.name: argument.dims for argument in self.contract.arguments}
        made = {**self.contract.results, **self.kept}
        return {**named, **{name: tuple(text.split()) for name, text in made.items()}}

    @property
    def count(self) -> int:
        """How many of the outputs are the operator's results."""
        return len(self.contract.results)

    def dims_of(self, names: Iterable[str]) -> list[DimNames]:
        """Return the dims of some tensors."""
        return [self.dims[name] for name in names]

    def remember(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what the backward pass needs."""
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        by_name = dict(zip(self.arguments, inputs, strict=False))
        by_name |= dict(zip(self.outputs, outputs, strict=True))
        ctx.save_for_backward(*(by_name[name] for name in self.saves))
        ctx.options = inputs[len(self.arguments) :]
        ctx.set_materialize_grads(False)
        results = outputs[: self.count]
        ctx.made = [(each.shape, each.dtype, each.device) for each in results]
        without = list(outputs[self.count :])
        without += [each for each in results if not each.is_floating_point()]
        ctx.mark_non_differentiable(*without)

    def function(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
        """Return both passes as an autograd function, which calls them without the dispatcher."""

        def make(ctx: Any, *given: Any) -> Any:
            output = forward(*given)
            self.remember(ctx, given, output)
            return output

        passes = {
            "forward": staticmethod(make),
            "backward": staticmethod(once_differentiable(self.differentiate(backward, backward))),
        }
        return type(self.contract.name, (torch.autograd.Function,), passes).apply  # type: ignore[attr-defined]

    def differentiate(self, back: Any, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the backward pass in autograd's form."""
        parameters = list(inspect.signature(backward, eval_str=True).parameters.values())
        may_be_none = [each.annotation is not Tensor for each in parameters[: self.count]]

        def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            pulls = [
                grad.contiguous()
                if grad is not None
                else (None if none else torch.zeros(made[0], dtype=made[1], device=made[2]))
                for grad, made, none in zip(grads, ctx.made, may_be_none, strict=False)
            ]
            needed = [ctx.needs_input_grad[place] for place in self.differentiable]
            wanted = sum(1 << place for place, need in enumerate(needed) if need)
            found = back(*pulls, *ctx.saved_tensors, wanted, *ctx.options)
            found = (found,) if isinstance(found, Tensor) else found
            slots: list[Tensor | None] = [None] * (len(self.arguments) + len(ctx.options))
            for place, need, gradient in zip(self.differentiable, needed, found, strict=True):
                slots[place] = gradient if need else None
            return tuple(slots)

        return differentiate

    def fake(self, *given: Any) -> Any:
        """Make the results and the kept tensors without data."""
        tensors = dict(zip(self.arguments, given, strict=False))
        sizes, first = self._sizes(tensors), given[0]
        wide = accumulator(first.dtype)
        found = [
            first.new_empty(
                _shape(self.dims[name], sizes),
                dtype=first.dtype if place < self.count and not self.contract.wide else wide,
            )
            for place, name in enumerate(self.outputs)
        ]
        return found[0] if len(found) == 1 else tuple(found)

    def fake_backward(self, *given: Any) -> Any:
        """Make a gradient of the shape and dtype of each argument that has one."""
        count = self.count + len(self.saves)
        pulls = dict(zip(self.contract.results, given, strict=False))
        known = {**pulls, **dict(zip(self.saves, given[self.count : count], strict=True))}
        sizes, found = self._sizes(known), []
        for number, place in enumerate(self.differentiable):
            argument = self.contract.arguments[place]
            # Of the same dtype: itself, what it is like, or a result, which is like the first.
            named = (known.get(argument.name), known.get(argument.like or ""), *pulls.values())
            like = next(each for each in named if each is not None)
            shape = _shape(argument.dims, sizes)
            wanted = is_wanted(given[count], number)
            found.append(like.new_empty(shape if wanted else (0,) * len(shape)))
        return found[0] if len(found) == 1 else tuple(found)

    def _sizes(self, tensors: Mapping[str, Tensor | None]) -> dict[str, tuple[int, ...]]:
        """Return the size of each symbol; leading dims have several."""
        sizes: dict[str, tuple[int, ...]] = {}
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            dims, shape = self.dims[name], tuple(tensor.shape)
            if dims[:1] == ("...",):
                leading = len(shape) - len(dims) + 1
                sizes["..."], shape, dims = shape[:leading], shape[leading:], dims[1:]
            sizes.update({symbol: (size,) for symbol, size in zip(dims, shape, strict=True)})
        return sizes


def _shape(dims: DimNames, sizes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sizes of a tensor's dims.

    Raises:
        KeyError: when a symbol has no size; then a fake must be passed to `opaque`.
    """
    return tuple(size for symbol in dims for size in sizes[symbol])
