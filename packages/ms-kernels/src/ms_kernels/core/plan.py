"""Signatures of a backend's forward and backward torch operators, and what derives from them.

The forward operator takes the contract's arguments and options and returns results, then
intermediates. The backward operator takes the results' gradients, saved tensors, a bit mask of the
gradients to compute, and the options. Their fake (meta) versions and the autograd function are
derived here.
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
"""Symbols of a tensor's sizes; ``"..."`` may only be first."""


def needs_grad(mask: int, index: int) -> bool:
    """Whether the gradient of the `index`-th differentiable argument is needed."""
    return bool(mask >> index & 1)


def absent_grad(like: Tensor) -> Tensor:
    """Return an empty tensor in place of a gradient that is not needed."""
    return like.new_empty((0,) * like.ndim)


@frozen(kw_only=True, eq=False)
class Plan:
    """Order of the tensors in the forward operator's results and the backward's arguments."""

    contract: Contract
    intermediates: dict[str, str]
    """Names and dims of the tensors that forward returns after the results."""
    saves: tuple[str, ...]
    """Names of the tensors saved for backward."""
    arguments: tuple[str, ...] = field(init=False)
    outputs: tuple[str, ...] = field(init=False)
    differentiable: tuple[int, ...] = field(init=False)
    """Indices of the arguments that have a gradient."""
    dims: dict[str, DimNames] = field(init=False)
    """Dims of every tensor, by name."""

    @arguments.default
    def _arguments(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.contract.arguments)

    @outputs.default
    def _outputs(self) -> tuple[str, ...]:
        return (*self.contract.results, *self.intermediates)

    @differentiable.default
    def _differentiable(self) -> tuple[int, ...]:
        arguments = enumerate(self.contract.arguments)
        return tuple(index for index, argument in arguments if argument.differentiable)

    @dims.default
    def _dims(self) -> dict[str, DimNames]:
        inputs = {argument.name: argument.dims for argument in self.contract.arguments}
        outputs = {**self.contract.results, **self.intermediates}
        return {**inputs, **{name: tuple(text.split()) for name, text in outputs.items()}}

    @property
    def count(self) -> int:
        """Number of results, which come before the intermediates in the outputs."""
        return len(self.contract.results)

    def dims_of(self, names: Iterable[str]) -> list[DimNames]:
        """Return the dims of the named tensors."""
        return [self.dims[name] for name in names]

    def remember(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the tensors, options and result shapes that the backward pass needs."""
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        by_name = dict(zip(self.arguments, inputs, strict=False))
        by_name |= dict(zip(self.outputs, outputs, strict=True))
        ctx.save_for_backward(*(by_name[name] for name in self.saves))
        ctx.options = inputs[len(self.arguments) :]
        # None for results without a gradient; `differentiate` creates zeros where they are needed.
        ctx.set_materialize_grads(False)
        results = outputs[: self.count]
        ctx.result_metas = [(result.shape, result.dtype, result.device) for result in results]
        # Intermediates and integer results are not differentiable.
        no_gradient = list(outputs[self.count :])
        no_gradient += [result for result in results if not result.is_floating_point()]
        ctx.mark_non_differentiable(*no_gradient)

    def function(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
        """Return an autograd function of both passes that bypasses the torch dispatcher."""

        def run_forward(ctx: Any, *args: Any) -> Any:
            output = forward(*args)
            self.remember(ctx, args, output)
            return output

        passes = {
            "forward": staticmethod(run_forward),
            "backward": staticmethod(once_differentiable(self.differentiate(backward, backward))),
        }
        return type(self.contract.name, (torch.autograd.Function,), passes).apply  # type: ignore[attr-defined]

    def differentiate(self, back: Any, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Adapt the backward function to autograd: (ctx, *grads) -> one gradient per input."""
        parameters = list(inspect.signature(backward, eval_str=True).parameters.values())
        optional = [parameter.annotation is not Tensor for parameter in parameters[: self.count]]

        def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            # Backward functions rely on contiguous gradients.
            output_grads = [
                grad.contiguous()
                if grad is not None
                else (None if may_be_none else torch.zeros(meta[0], dtype=meta[1], device=meta[2]))
                for grad, meta, may_be_none in zip(grads, ctx.result_metas, optional, strict=False)
            ]
            needed = [ctx.needs_input_grad[index] for index in self.differentiable]
            grad_mask = sum(1 << bit for bit, need in enumerate(needed) if need)
            input_grads = back(*output_grads, *ctx.saved_tensors, grad_mask, *ctx.options)
            input_grads = (input_grads,) if isinstance(input_grads, Tensor) else input_grads
            # One entry per input of the forward; options have no gradient.
            slots: list[Tensor | None] = [None] * (len(self.arguments) + len(ctx.options))
            for index, need, grad in zip(self.differentiable, needed, input_grads, strict=True):
                slots[index] = grad if need else None
            return tuple(slots)

        return differentiate

    def fake(self, *args: Any) -> Any:
        """Forward on fake tensors: results and intermediates without data."""
        tensors = dict(zip(self.arguments, args, strict=False))
        sizes, first = self._sizes(tensors), args[0]
        wide = accumulator(first.dtype)
        outputs = [
            first.new_empty(
                _shape(self.dims[name], sizes),
                dtype=first.dtype if index < self.count and not self.contract.wide else wide,
            )
            for index, name in enumerate(self.outputs)
        ]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def fake_backward(self, *args: Any) -> Any:
        """Backward on fake tensors: a gradient like each differentiable argument, without data."""
        count = self.count + len(self.saves)
        output_grads = dict(zip(self.contract.results, args, strict=False))
        tensors = output_grads | dict(zip(self.saves, args[self.count : count], strict=True))
        sizes, grads = self._sizes(tensors), []
        for bit, index in enumerate(self.differentiable):
            argument = self.contract.arguments[index]
            # Tensors of the argument's dtype: itself, the argument it must match, or a result.
            same_dtype = (tensors.get(argument.name), tensors.get(argument.like or ""))
            candidates = (*same_dtype, *output_grads.values())
            like = next(tensor for tensor in candidates if tensor is not None)
            shape = _shape(argument.dims, sizes)
            needed = needs_grad(args[count], bit)
            # As `absent_grad`: the right number of dims, and no elements.
            grads.append(like.new_empty(shape if needed else (0,) * len(shape)))
        return grads[0] if len(grads) == 1 else tuple(grads)

    def _sizes(self, tensors: Mapping[str, Tensor | None]) -> dict[str, tuple[int, ...]]:
        """Return the size of each symbol; ``"..."`` has one per leading dim."""
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
    """Return a tensor's shape from its dims.

    Raises:
        KeyError: if a symbol has no size; such an operator must pass its own fake to `opaque`.
    """
    return tuple(size for symbol in dims for size in sizes[symbol])
