"""Tokens sorted by the experts that they chose, a product for each expert, and the way back.

Sums run in a fixed order: a token's rows are gathered and added choice by choice, both ways, never
scattered, as a scattered sum depends on threads and devices.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_parallel.operators.cpu import has_no_values, widen


def permute_tokens(x: Tensor, experts: Tensor, *, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the rows of a mixture's tokens by the experts that they chose, C each.

    Args:
        x: (T, H).
        experts: (T, C) int64 or int32, from 0 to count - 1.
        count: Experts.

    Returns:
        rows (T·C, H): those of expert 0 first, in the order of their tokens; counts (count,) int64:
        rows of each expert; places (T, C) int64: the row of each choice.
    """
    flat = experts.reshape(-1).long()
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(count).scatter_add_(0, flat, torch.ones_like(flat))
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(flat), device=x.device))
    places = places.view(experts.shape)
    tokens = order // experts.shape[1]
    return _Permute.apply(x, tokens, places), counts, places  # type: ignore[no-untyped-call]


def grouped_matmul(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply consecutive rows by their expert's matrix.

    Args:
        x: (T, K), the rows of expert 0 first.
        weights: (E, K, N), dtype of x.
        counts: (E,) int64, rows of each expert, 0 allowed; their sum is T.

    Returns:
        (T, N), dtype of x.
    """
    if has_no_values(x):  # whose experts' rows are not known: one product keeps as much memory
        return x @ weights[0]
    # torch has no kernel for float64, and none for rows whose bytes are no multiple of 16.
    aligned = all(size * x.dtype.itemsize % 16 == 0 for size in weights.shape[1:])
    if x.dtype == torch.float64 or not x.numel() or not aligned:
        parts = torch.split(x, counts.tolist())
        return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])
    ends = counts.cumsum(0, dtype=torch.int32)
    result = F.grouped_mm(x, weights, offs=ends)
    return _WholeGradient.apply(result)  # type: ignore[no-any-return,no-untyped-call]


def unpermute_tokens(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Lead rows back to their tokens: the sum over choices of weight times row.

    Args:
        rows: (T·C, H).
        places: (T, C) int64, as `permute_tokens` gives them.
        weights: (T, C); 1 if None.

    Returns:
        (T, H), dtype of rows; summed in float32, in float64 for float64, choice by choice.
    """
    if weights is None:
        weights = torch.ones((), device=rows.device).expand(places.shape)
    return _Unpermute.apply(rows, places, weights)  # type: ignore[no-any-return,no-untyped-call]


def swiglu_of_pairs(pairs: Tensor) -> Tensor:
    """Compute silu(gate) · up of rows that hold both: the numbers of `swiglu`, to the bit.

    The gradient is written to where both lie, instead of being put together from two.

    Args:
        pairs: (T, 2, N), of each row the gate and then what it lets through.

    Returns:
        (T, N), dtype of pairs.
    """
    return _SwigluOfPairs.apply(pairs)  # type: ignore[no-any-return,no-untyped-call]


class _SwigluOfPairs(torch.autograd.Function):
    """silu(gate) · up."""

    @staticmethod
    def forward(ctx: Any, pairs: Tensor) -> Tensor:
        """Map (T, 2, N) to (T, N)."""
        gate, up = pairs.unbind(1)
        opened = F.silu(gate)
        ctx.save_for_backward(pairs, opened)
        return opened * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Map (T, N) to (T, 2, N)."""
        pairs, opened = ctx.saved_tensors
        gate, up = pairs.unbind(1)
        result = torch.empty_like(pairs)
        torch.mul(gradient, opened, out=result[:, 1])
        torch.ops.aten.silu_backward(gradient * up, gate, grad_input=result[:, 0])
        return result


class _Permute(torch.autograd.Function):
    """The rows of tokens, whose gradient is the sum of those of their rows, choice by choice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        """Map (T, H) to (T·C, H)."""
        ctx.save_for_backward(places)
        return x.index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Map (T·C, H) to (T, H)."""
        (places,) = ctx.saved_tensors
        total = widen(gradient.index_select(0, places[:, 0]))
        for place in places.unbind(1)[1:]:
            total += gradient.index_select(0, place)
        return total.to(gradient.dtype), None, None


class _Unpermute(torch.autograd.Function):
    """Weighted sums of tokens' rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Map (T·C, H) and (T, C) to (T, H)."""
        ctx.save_for_backward(rows, places, weights)
        wide = weights.to(torch.promote_types(rows.dtype, torch.float32))
        total = rows.index_select(0, places[:, 0]) * wide[:, :1]
        for choice, place in enumerate(places.unbind(1)[1:], 1):
            total.addcmul_(rows.index_select(0, place), wide[:, choice, None])
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        """Give the gradients of the rows, each of which has one token, and of the weights."""
        rows, places, weights = ctx.saved_tensors
        flat, of_rows, of_weights = places.flatten(), None, None
        tokens = torch.arange(len(places), device=rows.device)[:, None].expand(places.shape)
        token = torch.empty_like(flat).scatter_(0, flat, tokens.flatten())  # of each row
        each = widen(gradient).index_select(0, token)
        if ctx.needs_input_grad[2]:
            products = torch.linalg.vecdot(each, rows.to(each.dtype))
            of_weights = products.index_select(0, flat).view(weights.shape).to(weights.dtype)
        if ctx.needs_input_grad[0]:
            weight = torch.empty_like(flat, dtype=each.dtype)
            weight.scatter_(0, flat, weights.flatten().to(each.dtype))
            of_rows = each.mul_(weight[:, None]).to(rows.dtype)
        return of_rows, None, of_weights


class _WholeGradient(torch.autograd.Function):
    """The same values; torch's grouped product takes no gradient with repeated memory."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        """Pass (T, N) through as it is."""
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Make the gradient (T, N) contiguous."""
        return gradient.contiguous()
