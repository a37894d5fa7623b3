"""Fake quantization as autograd functions: forward like the target, straight-through backward.

Straight-through estimator (Bengio et al. 2013, arXiv:1308.3432): the gradient of rounding is taken
as the identity. The backward rounds the weight again, so a layer saves only as much as a plain
linear layer, and under FSDP no gathered copy outlives its layer.
Shapes: N rows, K features, G groups per row.
"""

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_compress.quantization.rounding import (
    Reduce,
    round_activations,
    round_weight,
    scale_gradient,
)
from ms_compress.quantization.scheme import Activations, Scheme


class Rule(NamedTuple):
    """Quantization that a layer applies to its weight and its input."""

    scheme: Scheme | None
    """None during the float part of a float-then-quantized schedule."""
    activations: Activations | None
    """None leaves the input unchanged."""


def effective(weight: Tensor, factor: Tensor | None, mask: Tensor | None, rule: Rule) -> Tensor:
    """Return the weight used in the computation: masked, then rounded."""
    masked = weight if mask is None else weight * mask
    return masked if rule.scheme is None else round_weight(masked, rule.scheme, factor)


def gradients(
    gradient: Tensor, weight: Tensor, factor: Tensor | None, mask: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor | None]:
    """Return gradients of a weight and its scales' factor, given the gradient of `effective`."""
    grad_factor = None
    if factor is not None and rule.scheme is not None:
        masked = weight if mask is None else weight * mask
        grad_weight, grad_factor = scale_gradient(masked, gradient, rule.scheme, factor)
        gradient = grad_weight.to(weight.dtype)
        grad_factor = grad_factor.to(factor.dtype)
    return (gradient if mask is None else gradient * mask), grad_factor


class FakeWeight(torch.autograd.Function):
    """Quantize a weight, with a straight-through gradient."""

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
        """Pass the gradient through; the scales' factor gets the gradient of LSQ."""
        weight, factor, mask = ctx.saved_tensors
        return *gradients(gradient, weight, factor, mask, ctx.rule), None, None


class FakeInput(torch.autograd.Function):
    """Quantize the input of a linear layer, with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activations: Activations, input_peak: Tensor | None) -> Tensor:
        """Round (..., K) to the same shape."""
        return round_activations(x, activations, None, input_peak)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Pass the gradient through."""
        return gradient, None, None


def _autocast(x: Tensor) -> Tensor:
    """Cast to autocast's compute dtype, so that only the narrow copy is saved for the backward."""
    device_type = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return x
    return x.to(torch.get_autocast_dtype(device_type))


class FakeLinear(torch.autograd.Function):
    """Linear map of a quantized input and a quantized weight, fused into one function."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        factor: Tensor | None,
        mask: Tensor | None,
        bias: Tensor | None,
        rule: Rule,
        reduce_max: Reduce | None,
        input_peak: Tensor | None,
    ) -> Tensor:
        """Map (..., K) to (..., N)."""
        rounded = x
        if rule.activations is not None:
            rounded = _inputs.of(x, rule.activations, reduce_max, input_peak)
        rounded = _autocast(rounded)
        ctx.save_for_backward(rounded, weight, factor, mask)
        ctx.rule = rule
        return torch.nn.functional.linear(rounded, effective(weight, factor, mask, rule), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight, factor and bias."""
        rounded, weight, factor, mask = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])  # (T, N)
        grad_x = grad_weight = grad_factor = grad_bias = None
        if needs_grad[0]:
            # (..., N) @ (N, K), with the rounded weight as in the forward
            grad_x = gradient @ effective(weight, factor, mask, ctx.rule).to(gradient.dtype)
        if needs_grad[1] or needs_grad[2]:
            product = flat.t() @ rounded.reshape(-1, rounded.shape[-1])  # (N, K)
            grad_weight, grad_factor = gradients(product, weight, factor, mask, ctx.rule)
        if needs_grad[4]:
            grad_bias = flat.sum(0)
        return grad_x, grad_weight, grad_factor, None, grad_bias, None, None, None


class _Inputs:
    """Cache of the last rounded input, as layers that share an input round it only once.

    The key is the tensor itself and its version; the entry is dropped when the tensor is freed.
    """

    def __init__(self) -> None:
        # One tuple, read and replaced atomically, as other threads have other inputs.
        self._last: tuple[weakref.ref[Tensor], tuple[object, ...], Tensor] | None = None

    def of(
        self,
        x: Tensor,
        activations: Activations,
        reduce_max: Reduce | None,
        input_peak: Tensor | None,
    ) -> Tensor:
        """Return the rounded input, cached or new."""
        # A compiler eliminates the repeated computation; inference tensors have no version; and
        # layers that share an input may be calibrated differently.
        if torch.compiler.is_compiling() or x.is_inference() or activations.is_calibrated:
            return round_activations(x, activations, reduce_max, input_peak)
        # An in-place change of the tensor raises its version.
        key = (x._version, activations, reduce_max is None)
        last = self._last
        if last is not None and last[0]() is x and last[1] == key:
            return last[2]
        rounded = round_activations(x, activations, reduce_max)
        self._last = (weakref.ref(x, self._forget), key, rounded)
        return rounded

    def _forget(self, freed: "weakref.ref[Tensor]") -> None:
        last = self._last
        if last is not None and last[0] is freed:
            self._last = None


_inputs = _Inputs()


def max_over_group(group: dist.ProcessGroup) -> Reduce:
    """Return an all-reduce of maxima over the processes that share a token's features."""

    def reduce_max(peak: Tensor) -> Tensor:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        return peak

    return reduce_max


def fake_input(x: Tensor, activations: Activations, input_peak: Tensor | None = None) -> Tensor:
    """Quantize an input as the target does, with a straight-through gradient."""
    return FakeInput.apply(x, activations, input_peak)  # type: ignore[no-untyped-call,no-any-return]


def fake_weight(
    weight: Tensor, rule: Rule, factor: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Quantize a weight (N, K) as the target does, with a straight-through gradient.

    Args:
        weight: (N, K).
        rule: quantization to apply.
        factor: (N, G), logarithm of a multiplier on each scale.
        mask: (N, K) bool; False for pruned weights.
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
    reduce_max: Reduce | None = None,
    input_peak: Tensor | None = None,
) -> Tensor:
    """Compute a linear layer as the target does, (..., K) to (..., N); see `fake_weight`.

    Args:
        x: (..., K).
        weight: (N, K).
        rule: quantization of weight and input.
        factor: (N, G).
        mask: (N, K) bool.
        bias: (N,).
        reduce_max: maximum over the processes, if a token's features are split over several.
        input_peak: (), largest input magnitude of the calibration, if the rule uses one.
    """
    return FakeLinear.apply(  # type: ignore[no-untyped-call,no-any-return]
        x, weight, factor, mask, bias, rule, reduce_max, input_peak
    )
