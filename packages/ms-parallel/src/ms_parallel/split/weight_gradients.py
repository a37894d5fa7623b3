"""Delays gradients of weights, so that a backward first gives what another rank awaits.

Nearly all of a weight's gradient is one product a linear map: its output's gradient with its input.
Where a schedule splits a backward, that product is not formed in I but kept as its two factors
until W. All else (norms, biases, embeddings) is cheap and has its gradient in I; so has a head
whose loss forms the gradient itself, as the vocabulary-parallel one and the chunked one do.

This differs from cutting the graph in two, as torch.distributed.pipelining does: nothing is walked
twice, so a recomputed block is recomputed once, and FSDP and DTensor see one common backward. The
first stage too has something to put off.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Later:
    """Weight-gradient products delayed by one backward pass."""

    def __init__(self) -> None:
        self.factors: list[tuple[Tensor, Tensor, Tensor]] = []
        """(weight (out, in), gradient (..., out), input (..., in))."""

    @torch.no_grad()
    def settle(self) -> None:
        """Accumulate all delayed weight gradients and free their factors."""
        while self.factors:
            weight, gradient, x = self.factors.pop()
            left, right = gradient.flatten(0, -2).t(), x.flatten(0, -2)
            if weight.grad is None:
                weight.grad = left @ right
            elif isinstance(weight.grad, DTensor):
                weight.grad.add_(left @ right)
            else:
                weight.grad.addmm_(left, right)  # no temporary of the weight's size


class putting_off(TorchFunctionMode):  # noqa: N801 - a context manager, read as a verb
    """While it lasts, linear maps that run leave their weights' gradients to `later`.

    Autograd hands modes on to its threads, so a block that is recomputed within it is as it was.
    """

    def __init__(self, later: Later) -> None:
        super().__init__()
        self.later = later

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace linear maps with a trainable weight; run other functions unchanged."""
        if func is F.linear and not kwargs and torch.is_grad_enabled() and args[1].is_leaf:
            x, weight, bias = (*args, None)[:3]
            if weight.requires_grad:
                return _Linear.apply(x, weight, bias, self.later)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """`F.linear` whose backward computes only the gradients of input and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Later) -> Tensor:
        """Map x (..., in) and weight (out, in) to (..., out)."""
        ctx.save_for_backward(x)
        # Not saved as a tensor: the gradient must go to this object itself.
        ctx.weight, ctx.later = weight, later
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        """Return the gradients of x and bias; store the weight-gradient factors in `later`."""
        (x,) = ctx.saved_tensors
        of_x = gradient @ ctx.weight.detach() if ctx.needs_input_grad[0] else None
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        ctx.later.factors.append((ctx.weight, gradient, x.detach()))
        return of_x, None, of_bias, None
