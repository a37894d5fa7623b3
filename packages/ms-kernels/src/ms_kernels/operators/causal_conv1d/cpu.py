"""Causal convolution one tap at a time; saves only its inputs for the backward pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.backends.cpu import on_cpu
from ms_kernels.contracts.call import accumulator
from ms_kernels.operators.causal_conv1d.contract import CONTRACT, hidden_taps, last_inputs


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    silu: bool,
    final_state: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the depthwise convolution with optional SiLU; with `final_state` the last inputs."""
    arguments = x, weight, bias, documents, state, silu
    result: Tensor = _Convolution.apply(*arguments)  # type: ignore[no-untyped-call]
    return (result, last_inputs(x, state, documents, weight.shape[1])) if final_state else result


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        documents: Tensor | None,
        state: Tensor | None,
        silu: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, documents, state)
        ctx.silu = silu
        total = _convolve(x, weight, bias, documents, state)
        return (F.silu(total, inplace=True) if silu else total).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, documents, state = ctx.saved_tensors
        grad_sums = grad.to(accumulator(x.dtype))
        if ctx.silu:
            # d silu(t) = gate · (1 + t · (1 - gate)), where gate = 1 / (1 + exp(-t))
            total = _convolve(x, weight, bias, documents, state)
            gate = total.sigmoid()
            # in place: total is not needed again
            grad_sums = total.mul_(1 - gate).add_(1).mul_(gate).mul_(grad_sums)
        grad_x, grad_weight, grad_state = _differentiate(grad_sums, x, weight, documents, state)
        grad_bias = None if bias is None else grad_sums.sum((0, 1)).to(bias.dtype)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_bias, None, grad_state, None


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None, state: Tensor | None
) -> Tensor:
    """Return ``Σ_d weight[:, K - 1 - d] · x[s - d] + bias`` in the accumulator dtype."""
    wide = accumulator(x.dtype)
    values, taps = x.to(wide), weight.to(wide)
    hidden = hidden_taps(documents, weight.shape[1])
    total = values * taps[:, -1]
    if bias is not None:
        total += bias
    for distance in range(1, weight.shape[1]):
        tap = taps[:, -1 - distance]
        earlier = values[:, : max(x.shape[1] - distance, 0)]
        _add_terms(total[:, distance:], earlier, tap, hidden, distance, distance)
        if state is not None:
            early = state[:, -distance:][:, : x.shape[1]].to(wide)
            _add_terms(total[:, :distance], early, tap, hidden, distance, 0)
    return total


def _differentiate(
    dsum: Tensor, x: Tensor, weight: Tensor, documents: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, weight and state, given the gradient of the sums (B, S, C)."""
    wide, positions = dsum.dtype, x.shape[1]
    values, taps = x.to(wide), weight.to(wide)
    hidden = hidden_taps(documents, weight.shape[1])
    grad_x, grad_weight = dsum * taps[:, -1], torch.empty_like(taps)
    grad_weight[:, -1] = (dsum * values).sum((0, 1))
    grad_state = None if state is None else torch.zeros_like(state, dtype=wide)
    for distance in range(1, weight.shape[1]):
        # x[s] contributes to y[s + distance]
        tap, inner = taps[:, -1 - distance], max(positions - distance, 0)
        shifted = dsum[:, distance:]
        _add_terms(grad_x[:, :inner], shifted, tap, hidden, distance, distance)
        grad_tap = _terms(shifted, values[:, :inner], hidden, distance, distance).sum((0, 1))
        if state is not None and grad_state is not None:
            early = dsum[:, :distance]  # these outputs read the tap from the state
            first = state.shape[1] - distance
            past = slice(first, first + early.shape[1])
            _add_terms(grad_state[:, past], early, tap, hidden, distance, 0)
            terms = _terms(early, state[:, past].to(wide), hidden, distance, 0)
            grad_tap = grad_tap + terms.sum((0, 1))
        grad_weight[:, -1 - distance] = grad_tap
    return (
        grad_x,
        grad_weight,
        None if grad_state is None or state is None else grad_state.to(state.dtype),
    )


def _terms(x: Tensor, y: Tensor, hidden: list[Tensor] | None, distance: int, first: int) -> Tensor:
    """Return ``x · y``, with 0 where the tap is hidden for positions starting at `first`.

    The product is masked instead of a factor, because the other factor may be infinite.
    """
    product = x * y
    if hidden is None:
        return product
    outside = hidden[distance][:, first : first + x.shape[1]]
    return product.masked_fill_(outside.unsqueeze(-1), 0)


def _add_terms(
    total: Tensor,
    x: Tensor,
    y: Tensor,
    hidden: list[Tensor] | None,
    distance: int,
    first: int,
) -> None:
    """Add `_terms` to `total`, in one fused operation if nothing is hidden."""
    if hidden is None:
        total.addcmul_(x, y)
    else:
        total += _terms(x, y, hidden, distance, first)


IMPLEMENTATION = on_cpu(CONTRACT, causal_conv1d, "one tap at a time; saves only its inputs")
