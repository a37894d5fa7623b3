"""Defers weight gradients, so that a backward pass first computes the gradient of its input.

Nearly all of a weight's gradient is one product per linear layer: output gradient times input.
Where a schedule splits the backward pass into I (input) and W (weight), I does not compute that
product but saves its two factors until W. All other gradients (norms, biases, embeddings) are cheap
and computed in I. So is the head's gradient if the loss computes it (vocabulary-parallel and
chunked loss).

Differences from torch.distributed.pipelining, which cuts the autograd graph in two:

1. The graph is traversed once, so a checkpointed block is recomputed once.
2. FSDP and DTensor see one ordinary backward pass.
3. The first stage, which needs no input gradient, also has weight gradients to defer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class DeferredWeightGrads:
    """Factors of the weight gradients deferred by one backward pass."""

    def __init__(self) -> None:
        self.factors: list[tuple[Tensor, Tensor, Tensor]] = []
        """(weight (out, in), gradient (..., out), input (..., in))."""

    @torch.no_grad()
    def flush(self) -> None:
        """Accumulate all deferred weight gradients and free their factors."""
        while self.factors:
            weight, gradient, x = self.factors.pop()
            dy_t, x = gradient.flatten(0, -2).t(), x.flatten(0, -2)  # (out, T), (T, in)
            if weight.grad is None:
                weight.grad = dy_t @ x
            elif isinstance(weight.grad, DTensor):
                weight.grad.add_(dy_t @ x)
            else:
                weight.grad.addmm_(dy_t, x)  # no temporary of the weight's size


class defer_weight_grads(TorchFunctionMode):  # noqa: N801 - a context manager, read as a verb
    """Defer the weight gradients of linear layers whose forward runs inside the context.

    Autograd propagates function modes to its threads, so recomputed blocks defer as well.
    """

    def __init__(self, deferred: DeferredWeightGrads) -> None:
        super().__init__()
        self.deferred = deferred

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace linear layers with a trainable weight; run other functions unchanged."""
        # Leaf weights only: a view or cast of a weight has no `grad` to accumulate into.
        if func is F.linear and not kwargs and torch.is_grad_enabled() and args[1].is_leaf:
            x, weight, bias = (*args, None)[:3]
            if weight.requires_grad:
                return _Linear.apply(x, weight, bias, self.deferred)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """`F.linear` whose backward pass computes only the gradients of input and bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferred: DeferredWeightGrads
    ) -> Tensor:
        """Map x (..., in) and weight (out, in) to (..., out)."""
        ctx.save_for_backward(x)
        # Not saved by `save_for_backward`: the gradient must be set on this very parameter.
        ctx.weight, ctx.deferred = weight, deferred
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        """Return the gradients of x and bias; save the factors of the weight gradient."""
        (x,) = ctx.saved_tensors
        dx = gradient @ ctx.weight.detach() if ctx.needs_input_grad[0] else None
        dbias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        ctx.deferred.factors.append((ctx.weight, gradient, x.detach()))
        return dx, None, dbias, None
