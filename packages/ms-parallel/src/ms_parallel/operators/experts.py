"""Token permutation and grouped matrix products for mixtures of experts.

Sums run in a fixed order in both passes: the rows of a token are gathered and added in the order of
its choices. A scatter-add would make the result depend on threads and devices.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_parallel.operators.cpu import has_no_values, widen


def permute_tokens(x: Tensor, experts: Tensor, *, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort token rows by expert; every token has C experts.

    Args:
        x: (T, H).
        experts: (T, C) int64 or int32, from 0 to count - 1.
        count: Number of experts.

    Returns:
        rows (T·C, H): sorted by expert, then by token; counts (count,) int64: rows per expert;
        places (T, C) int64: index in rows for each choice.
    """
    flat = experts.reshape(-1).long()
    # Stable, so that rows of one expert keep the order of their tokens.
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(count).scatter_add_(0, flat, torch.ones_like(flat))
    # Inverse permutation: place of each choice among the sorted rows.
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(flat), device=x.device))
    places = places.view(experts.shape)
    tokens = order // experts.shape[1]  # (T·C,) token of each row
    return _Permute.apply(x, tokens, places), counts, places  # type: ignore[no-untyped-call]


def grouped_matmul(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply each group of consecutive rows by the matrix of its expert.

    Args:
        x: (T, K), sorted by expert.
        weights: (E, K, N), dtype of x.
        counts: (E,) int64, rows per expert, 0 allowed; they sum to T.

    Returns:
        (T, N), dtype of x.
    """
    if has_no_values(x):  # counts are unknown; a single product needs the same memory
        return x @ weights[0]
    # torch has no grouped kernel for float64 or for row sizes that are not a multiple of 16 bytes.
    aligned = all(size * x.dtype.itemsize % 16 == 0 for size in weights.shape[1:])
    if x.dtype == torch.float64 or not x.numel() or not aligned:
        parts = torch.split(x, counts.tolist())
        return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])
    ends = counts.cumsum(0, dtype=torch.int32)  # end row of each expert
    result = F.grouped_mm(x, weights, offs=ends)
    return _WholeGradient.apply(result)  # type: ignore[no-any-return,no-untyped-call]


def unpermute_tokens(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Combine the rows of each token: the weighted sum over its choices.

    Args:
        rows: (T·C, H).
        places: (T, C) int64, from `permute_tokens`.
        weights: (T, C); 1 if None.

    Returns:
        (T, H), dtype of rows; accumulated in float32 (float64 for float64) in the order of choices.
    """
    if weights is None:
        weights = torch.ones((), device=rows.device).expand(places.shape)
    return _Unpermute.apply(rows, places, weights)  # type: ignore[no-any-return,no-untyped-call]


def swiglu_of_pairs(pairs: Tensor) -> Tensor:
    """Compute silu(gate) · up of stacked gate and up rows; bit-identical to `swiglu`.

    The backward pass writes both gradients into one tensor instead of concatenating two.

    Args:
        pairs: (T, 2, N), gate and up of each row.

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
        activated = F.silu(gate)
        ctx.save_for_backward(pairs, activated)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Map (T, N) to (T, 2, N)."""
        pairs, activated = ctx.saved_tensors
        gate, up = pairs.unbind(1)
        result = torch.empty_like(pairs)
        torch.mul(gradient, activated, out=result[:, 1])
        torch.ops.aten.silu_backward(gradient * up, gate, grad_input=result[:, 0])
        return result


class _Permute(torch.autograd.Function):
    """Gather of token rows; the backward pass sums the row gradients in the order of choices."""

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
        for index in places.unbind(1)[1:]:
            total += gradient.index_select(0, index)
        return total.to(gradient.dtype), None, None


class _Unpermute(torch.autograd.Function):
    """Weighted sum of the rows of each token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Map (T·C, H) and (T, C) to (T, H)."""
        ctx.save_for_backward(rows, places, weights)
        wide = weights.to(torch.promote_types(rows.dtype, torch.float32))
        total = rows.index_select(0, places[:, 0]) * wide[:, :1]
        for choice, index in enumerate(places.unbind(1)[1:], 1):
            total.addcmul_(rows.index_select(0, index), wide[:, choice, None])
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        """Compute the gradients of the rows and of the weights."""
        rows, places, weights = ctx.saved_tensors
        flat, grad_rows, grad_weights = places.flatten(), None, None
        tokens = torch.arange(len(places), device=rows.device)[:, None].expand(places.shape)
        token = torch.empty_like(flat).scatter_(0, flat, tokens.flatten())  # token of each row
        token_grads = widen(gradient).index_select(0, token)
        if ctx.needs_input_grad[2]:
            products = torch.linalg.vecdot(token_grads, rows.to(token_grads.dtype))
            grad_weights = products.index_select(0, flat).view(weights.shape).to(weights.dtype)
        if ctx.needs_input_grad[0]:
            weight = torch.empty_like(flat, dtype=token_grads.dtype)
            weight.scatter_(0, flat, weights.flatten().to(token_grads.dtype))
            grad_rows = token_grads.mul_(weight[:, None]).to(rows.dtype)
        return grad_rows, None, grad_weights


class _WholeGradient(torch.autograd.Function):
    """Identity with a contiguous gradient: `grouped_mm` rejects expanded gradients."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        """Return (T, N) unchanged."""
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Make the gradient (T, N) contiguous."""
        return gradient.contiguous()
