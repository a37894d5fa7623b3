"""Moves parts of rows between the processes of the context axis, with the gradients' way back."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def gathered(part: Tensor, mesh: DeviceMesh, *, summed: bool) -> Tensor:
    """Gather all processes' parts (B, S/N, ...) behind one another, (B, S, ...).

    Args:
        part: of this process.
        mesh: of one axis.
        summed: each process computes something else of it, so that their gradients are added up;
            else all compute the same, and each takes its part of the gradient.
    """
    spread = DTensor.from_local(part, mesh, [Shard(1)], run_check=False)
    whole = spread.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial() if summed else Replicate()])


def traded(part: Tensor, mesh: DeviceMesh, *, from_dim: int, to_dim: int) -> Tensor:
    """Gather all of dim `from_dim`, of which processes have parts, and keep a part of `to_dim`."""
    spread = DTensor.from_local(part, mesh, [Shard(from_dim)], run_check=False)
    return spread.redistribute(placements=[Shard(to_dim)]).to_local()


def reordered(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return `x` (B, S, ...) with the position order[b, i] of each row b at i.

    Args:
        x: all positions.
        order: (B, S) int64, a permutation of each row.
        inverse: the other way.
    """
    made: Tensor = _Reorder.apply(x, _flat(order), _flat(inverse))  # type: ignore[no-untyped-call]
    return made


def _flat(order: Tensor) -> Tensor:
    rows = torch.arange(len(order), device=order.device)[:, None]
    return (order + rows * order.shape[1]).flatten()


class _Reorder(torch.autograd.Function):
    """Takes positions in another order; its gradient is taken in the first one, without sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """Take the positions of x, (B, S, ...), in the flat order; the shape stays."""
        ctx.save_for_backward(order, inverse)
        return x.flatten(0, 1).index_select(0, order).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Give the gradient of x alone."""
        order, inverse = ctx.saved_tensors
        back: Tensor = _Reorder.apply(gradient.contiguous(), inverse, order)  # type: ignore[no-untyped-call]
        return back, None, None


class Spans:
    """Overlapping parts of a tensor, whose gradients are added up in one place.

    Slices alone would each give a gradient of the whole tensor's size.

    Args:
        count: how many parts will be taken; the backward needs those of all.
    """

    def __init__(self, count: int) -> None:
        self.count = self.left = count
        self.gradient: Tensor | None = None

    def at(self, whole: Tensor, rows: slice, positions: slice) -> Tensor:
        """Return one part of the tensor (B, S, ...)."""
        made: Tensor = _Span.apply(whole, self, (rows, positions))  # type: ignore[no-untyped-call]
        return made


class _Span(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, spans: Spans, place: tuple[slice, slice]) -> Tensor:
        """Return the part at a place."""
        ctx.spans, ctx.place, ctx.shape = spans, place, whole.shape
        return whole[place]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        """Add up the gradients of all parts; return the sum with the last of them."""
        spans: Spans = ctx.spans
        if spans.gradient is None:
            spans.gradient = gradient.new_zeros(ctx.shape)
        spans.gradient[ctx.place] += gradient
        spans.left -= 1
        if spans.left:
            return None, None, None
        total, spans.gradient, spans.left = spans.gradient, None, spans.count
        return total, None, None
