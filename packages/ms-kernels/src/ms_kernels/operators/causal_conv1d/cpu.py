"""The causal convolution a tap at a time, saving its inputs alone for the backward pass."""

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
    """Return each channel's convolution, perhaps through SiLU, and perhaps the last inputs."""
    given = x, weight, bias, documents, state, silu
    result: Tensor = _Convolution.apply(*given)  # type: ignore[no-untyped-call]
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
        pull = grad.to(accumulator(x.dtype))
        if ctx.silu:
            # d silu(t) = gate · (1 + t · (1 - gate)), where gate = 1 / (1 + exp(-t))
            total = _convolve(x, weight, bias, documents, state)
            gate = total.sigmoid()
            pull = total.mul_(1 - gate).add_(1).mul_(gate).mul_(pull)
        to_x, to_weight, to_state = _differentiate(pull, x, weight, documents, state)
        to_bias = None if bias is None else pull.sum((0, 1)).to(bias.dtype)
        return to_x.to(x.dtype), to_weight.to(weight.dtype), to_bias, None, to_state, None


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None, state: Tensor | None
) -> Tensor:
    """Return ``Σ_d weight[:, K - 1 - d] · x[s - d] + bias``, not rounded."""
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
    pull: Tensor, x: Tensor, weight: Tensor, documents: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, weight and state for those of the sums (B, S, C)."""
    wide, positions = pull.dtype, x.shape[1]
    values, taps = x.to(wide), weight.to(wide)
    hidden = hidden_taps(documents, weight.shape[1])
    to_x, to_weight = pull * taps[:, -1], torch.empty_like(taps)
    to_weight[:, -1] = (pull * values).sum((0, 1))
    to_state = None if state is None else torch.zeros_like(state, dtype=wide)
    for distance in range(1, weight.shape[1]):
        tap, inner = taps[:, -1 - distance], max(positions - distance, 0)
        later = pull[:, distance:]
        _add_terms(to_x[:, :inner], later, tap, hidden, distance, distance)
        slope = _terms(later, values[:, :inner], hidden, distance, distance).sum((0, 1))
        if state is not None and to_state is not None:
            early = pull[:, :distance]
            first = state.shape[1] - distance
            past = slice(first, first + early.shape[1])
            _add_terms(to_state[:, past], early, tap, hidden, distance, 0)
            terms = _terms(early, state[:, past].to(wide), hidden, distance, 0)
            slope = slope + terms.sum((0, 1))
        to_weight[:, -1 - distance] = slope
    return to_x, to_weight, None if to_state is None or state is None else to_state.to(state.dtype)


def _terms(
    left: Tensor, right: Tensor, hidden: list[Tensor] | None, distance: int, first: int
) -> Tensor:
    """Return ``left · right``, 0 where the tap of the positions from `first` on is hidden.

    The product is masked, not a factor: the other one may be infinite.
    """
    product = left * right
    if hidden is None:
        return product
    outside = hidden[distance][:, first : first + left.shape[1]]
    return product.masked_fill_(outside.unsqueeze(-1), 0)


def _add_terms(
    total: Tensor,
    left: Tensor,
    right: Tensor,
    hidden: list[Tensor] | None,
    distance: int,
    first: int,
) -> None:
    """Add `_terms` to `total`, in one operation where nothing is hidden."""
    if hidden is None:
        total.addcmul_(left, right)
    else:
        total += _terms(left, right, hidden, distance, first)


IMPLEMENTATION = on_cpu(CONTRACT, causal_conv1d, "a tap at a time; saves its inputs alone")
