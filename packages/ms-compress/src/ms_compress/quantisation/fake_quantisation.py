"""Fake quantisation as autograd functions: forward as the target, backward straight through.

Straight through (Bengio et al. 2013, arXiv:1308.3432): the gradient of rounding is that of doing
nothing. A weight is rounded again in the backward, so that between the two nothing is kept but what
a plain linear layer keeps; under FSDP no gathered copy outlives its layer.
Shapes: N rows, K features, G groups of a row.
"""

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_compress.quantisation.rounding import (
    Reduce,
    round_activations,
    round_weight,
    scale_gradient,
)
from ms_compress.quantisation.scheme import Activations, Scheme


class Rule(NamedTuple):
    """What a layer does to its weight and its input."""

    scheme: Scheme | None
    """None while a float-then-quantised schedule is in its float part."""
    activations: Activations | None
    """None leaves the input as it is."""


def effective(weight: Tensor, factor: Tensor | None, mask: Tensor | None, rule: Rule) -> Tensor:
    """Return what is computed with in a weight's place: masked, then rounded."""
    kept = weight if mask is None else weight * mask
    return kept if rule.scheme is None else round_weight(kept, rule.scheme, factor)


def gradients(
    gradient: Tensor, weight: Tensor, factor: Tensor | None, mask: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor | None]:
    """Return gradients of a weight and of its scales' factor, from that of `effective`."""
    of_factor = None
    if factor is not None and rule.scheme is not None:
        kept = weight if mask is None else weight * mask
        passed, of_factor = scale_gradient(kept, gradient, rule.scheme, factor)
        gradient = passed.to(weight.dtype)
        of_factor = of_factor.to(factor.dtype)
    return (gradient if mask is None else gradient * mask), of_factor


class FakeWeight(torch.autograd.Function):
    """A weight as its target holds it, with a straight-through gradient."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, factor: Tensor | None, mask: Tensor | None, rule: Rule
    ) -> Tensor:
        """Round (N, K) to the same shape."""
        ctx.save_for_backward(weight, factor, mask)
        ctx.rule = rule
        return effective(weight, factor, mask, rule)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Pass the gradient straight through; the scales' factor gets LSQ's."""
        weight, factor, mask = ctx.saved_tensors
        return *gradients(gradient, weight, factor, mask, ctx.rule), None, None


class FakeInput(torch.autograd.Function):
    """The input of a product as its target rounds it, with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Activations) -> Tensor:
        """Round (..., K) to the same shape."""
        return round_activations(x, how)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Pass the gradient straight through."""
        return gradient, None


def _autocast(x: Tensor) -> Tensor:
    """Cast to what autocast computes products in, so that only this is kept for the backward."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


class FakeLinear(torch.autograd.Function):
    """A linear map of a rounded input and a rounded weight, in one function."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        factor: Tensor | None,
        mask: Tensor | None,
        bias: Tensor | None,
        rule: Rule,
        largest: Reduce | None,
    ) -> Tensor:
        """Map (..., K) to (..., N)."""
        rounded = x if rule.activations is None else _inputs.of(x, rule.activations, largest)
        rounded = _autocast(rounded)
        ctx.save_for_backward(rounded, weight, factor, mask)
        ctx.rule = rule
        return torch.nn.functional.linear(rounded, effective(weight, factor, mask, rule), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of input, weight, factor and bias."""
        rounded, weight, factor, mask = ctx.saved_tensors
        needs = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_x = of_weight = of_factor = of_bias = None
        if needs[0]:
            of_x = gradient @ effective(weight, factor, mask, ctx.rule).to(gradient.dtype)
        if needs[1] or needs[2]:
            product = flat.t() @ rounded.reshape(-1, rounded.shape[-1])
            of_weight, of_factor = gradients(product, weight, factor, mask, ctx.rule)
        if needs[4]:
            of_bias = flat.sum(0)
        return of_x, of_weight, of_factor, None, of_bias, None, None


class _Inputs:
    """Remembers the last rounded input: the layers that share one round it once.

    It is known by the tensor itself and its version, and goes when the tensor goes.
    """

    def __init__(self) -> None:
        # One tuple, taken and replaced at once: other threads have inputs of their own.
        self._last: tuple[weakref.ref[Tensor], tuple[object, ...], Tensor] | None = None

    def of(self, x: Tensor, how: Activations, largest: Reduce | None) -> Tensor:
        """Return the rounded input, remembered or new."""
        # A compiler finds what is computed twice by itself; inference counts no versions.
        if torch.compiler.is_compiling() or x.is_inference():
            return round_activations(x, how, largest)
        key = (x._version, how, largest is None)
        last = self._last
        if last is not None and last[0]() is x and last[1] == key:
            return last[2]
        rounded = round_activations(x, how, largest)
        self._last = (weakref.ref(x, self._forget), key, rounded)
        return rounded

    def _forget(self, gone: "weakref.ref[Tensor]") -> None:
        last = self._last
        if last is not None and last[0] is gone:
            self._last = None


_inputs = _Inputs()


def largest_over(group: dist.ProcessGroup) -> Reduce:
    """Return what takes the largest over the processes of a group, which share rows' features."""

    def largest(peak: Tensor) -> Tensor:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        return peak

    return largest


def fake_input(x: Tensor, how: Activations) -> Tensor:
    """Round an input as the target does, with a straight-through gradient."""
    return FakeInput.apply(x, how)  # type: ignore[no-untyped-call,no-any-return]


def fake_weight(
    weight: Tensor, rule: Rule, factor: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Round a weight (N, K) as the target does, with a straight-through gradient.

    Args:
        weight: (N, K).
        rule: what is done to it.
        factor: (N, G), the logarithm of what each scale is multiplied by.
        mask: (N, K) bool; False where a weight is pruned.
    """
    return FakeWeight.apply(weight, factor, mask, rule)  # type: ignore[no-untyped-call,no-any-return]


def fake_linear(
    x: Tensor,
    weight: Tensor,
    rule: Rule,
    *,
    factor: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    largest: Reduce | None = None,
) -> Tensor:
    """Compute a linear layer as the target does, (..., K) to (..., N); see `fake_weight`.

    Args:
        x: (..., K).
        weight: (N, K).
        rule: what is done to weight and input.
        factor: (N, G).
        mask: (N, K) bool.
        bias: (N,).
        largest: where a token's features lie on several processes, the largest over them.
    """
    return FakeLinear.apply(x, weight, factor, mask, bias, rule, largest)  # type: ignore[no-untyped-call,no-any-return]
