"""Differentiable exchanges of row positions between context-parallel ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def all_gather_positions(local: Tensor, mesh: DeviceMesh, *, sum_grads: bool) -> Tensor:
    """Concatenate the positions (B, S/N, ...) of all ranks in rank order, (B, S, ...).

    Args:
        local: this rank's positions.
        mesh: one-dimensional mesh of the N ranks.
        sum_grads: ranks compute different functions of the result, so their gradients are summed.
            Otherwise all compute the same function, and each takes its slice of the gradient.
    """
    sharded = DTensor.from_local(local, mesh, [Shard(1)], run_check=False)
    full = sharded.redistribute(placements=[Replicate()])
    # Partial: the backward pass is a reduce-scatter. Replicate: it takes the local slice.
    return full.to_local(grad_placements=[Partial() if sum_grads else Replicate()])


def all_to_all(local: Tensor, mesh: DeviceMesh, *, gather_dim: int, split_dim: int) -> Tensor:
    """Gather dim `gather_dim`, which is split over ranks, and split `split_dim` instead."""
    # Shard to Shard is an all-to-all, in the backward pass too.
    sharded = DTensor.from_local(local, mesh, [Shard(gather_dim)], run_check=False)
    return sharded.redistribute(placements=[Shard(split_dim)]).to_local()


def permute_positions(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Permute the positions of each row: output[b, i] = x[b, order[b, i]].

    Args:
        x: (B, S, ...).
        order: (B, S) int64, a permutation of each row.
        inverse: the inverse permutation.
    """
    out: Tensor = _Permute.apply(x, _flat_index(order), _flat_index(inverse))  # type: ignore[no-untyped-call]
    return out


def _flat_index(order: Tensor) -> Tensor:
    """Turn positions (B, S) into indices (B·S,) into the flattened rows."""
    rows = torch.arange(len(order), device=order.device)[:, None]
    return (order + rows * order.shape[1]).flatten()


class _Permute(torch.autograd.Function):
    """Permutation whose gradient is the inverse permutation, a gather instead of a scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """Permute x (B, S, ...) by flat indices."""
        ctx.save_for_backward(order, inverse)
        return x.flatten(0, 1).index_select(0, order).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x."""
        order, inverse = ctx.saved_tensors
        dx: Tensor = _Permute.apply(gradient.contiguous(), inverse, order)  # type: ignore[no-untyped-call]
        return dx, None, None


class SharedGradSlices:
    """Overlapping slices of one tensor whose gradients accumulate in one buffer.

    Plain slicing would allocate a gradient of the full tensor's size per slice.

    Args:
        count: number of slices that will be taken; the backward pass must reach every one.
    """

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.gradient: Tensor | None = None

    def slice(self, full: Tensor, rows: slice, positions: slice) -> Tensor:
        """Return one slice of the tensor (B, S, ...)."""
        out: Tensor = _Slice.apply(full, self, (rows, positions))  # type: ignore[no-untyped-call]
        return out


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, full: Tensor, slices: SharedGradSlices, index: tuple[slice, slice]
    ) -> Tensor:
        """Return full[index]."""
        ctx.slices, ctx.index, ctx.shape = slices, index, full.shape
        return full[index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        """Accumulate the gradient; return the sum once the last slice has arrived."""
        slices: SharedGradSlices = ctx.slices
        if slices.gradient is None:
            slices.gradient = gradient.new_zeros(ctx.shape)
        slices.gradient[ctx.index] += gradient
        slices.pending -= 1
        # Autograd adds up the returned gradients, so only one slice may return the sum.
        if slices.pending:
            return None, None, None
        total, slices.gradient, slices.pending = slices.gradient, None, slices.count
        return total, None, None
