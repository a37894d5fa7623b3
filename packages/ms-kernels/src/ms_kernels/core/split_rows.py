"""Runs operators on the local shards of DTensors and assembles the results.

It is for operators whose sharding does not follow from dim names (`ms_kernels.core.sharding`): a
mean loss divides by the rows of all ranks, and a rank with a slice of the features still sorts all
tokens. Rows of hidden stay sharded; anything else that is sharded, such as a weight over its
classes, is gathered first.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ms_kernels.contracts.contract import Contract
from ms_kernels.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_split(tensors: Sequence[Tensor]) -> bool:
    """Whether any tensor is a DTensor, without importing DTensor."""
    return any(getattr(tensor, "placements", None) is not None for tensor in tensors)


def rows_mapped(contract: Contract, tensors: Sequence[Tensor], run: Callable[..., Any]) -> Any:
    """Return one result per row, or a tuple of them, sharded like the rows of the first tensor.

    Args:
        contract: contract of the operator.
        tensors: hidden (..., H), weight (V, H) and tokens (...).
        run: the operator on local shards.

    Raises:
        ArgumentError: if one is not a DTensor, or is on another mesh.
    """
    rows, shards = _local_rows(contract, tensors)
    results = run(*shards)
    if isinstance(results, tuple):
        return tuple(_from_local(result, rows, tensors[2]) for result in results)
    return _from_local(results, rows, tensors[2])


def rows_reduced(
    contract: Contract,
    tensors: Sequence[Tensor],
    run: Callable[..., Tensor],
    *,
    mean_over: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Return the sum or mean over the rows of all ranks, replicated on each.

    Args:
        contract: contract of the operator.
        tensors: hidden (..., H), weight (V, H) and targets (...).
        run: the operator on local shards; returns the sum over local rows.
        mean_over: counts the valid targets among the local ones, for a mean. None: a sum.

    Raises:
        ArgumentError: if one is not a DTensor, or is on another mesh.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    rows, shards = _local_rows(contract, tensors)
    mesh = _as_dtensor(tensors[0]).device_mesh
    partial = [Partial() if row.is_shard() else Replicate() for row in rows]

    def all_reduce(local: Tensor) -> DTensor:
        summed = DTensor.from_local(local, mesh, partial, run_check=False)
        return summed.redistribute(mesh, [Replicate()] * len(rows))

    total = all_reduce(run(*shards))
    # Sum the counts before dividing: a single rank may have no valid target.
    return total if mean_over is None else total / all_reduce(mean_over(shards[2])).clamp(min=1)


def permuted(
    contract: Contract, tensors: Sequence[Tensor], run: Callable[..., Sequence[Tensor]]
) -> Any:
    """Return sorted rows, sharded over features like x, and replicated counts and positions.

    Args:
        contract: contract of the operator.
        tensors: x (T, H) and experts (T, C).
        run: the operator on local shards.

    Raises:
        ArgumentError: if one is not a DTensor, or is on another mesh.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    _check(contract, tensors)
    x, experts = (_as_dtensor(tensor) for tensor in tensors)
    mesh, replicated = x.device_mesh, [Replicate()] * len(x.placements)
    by_feature = [p if p.is_shard(1) else Replicate() for p in x.placements]
    local = x.redistribute(mesh, by_feature).to_local(grad_placements=by_feature)
    rows, *indices = run(local, experts.redistribute(mesh, replicated).to_local())
    count = experts.shape[0] * experts.shape[1]
    features = [Shard(1) if p.is_shard() else p for p in by_feature]
    shape, stride = torch.Size((count, x.shape[1])), (x.shape[1], 1)
    sorted_rows = DTensor.from_local(
        rows.contiguous(), mesh, features, run_check=False, shape=shape, stride=stride
    )
    others = (DTensor.from_local(index, mesh, replicated, run_check=False) for index in indices)
    return (sorted_rows, *others)


def _local_rows(
    contract: Contract, tensors: Sequence[Tensor]
) -> tuple[list["Placement"], list[Tensor]]:
    """Return the rows' placements, and locally: hidden rows, the full weight, their targets."""
    from torch.distributed.tensor import Partial, Replicate

    _check(contract, tensors)
    hidden, weight, targets = (_as_dtensor(tensor) for tensor in tensors)
    mesh, feature_dim = hidden.device_mesh, hidden.ndim - 1
    rows: list[Placement] = [
        placement if any(placement.is_shard(dim) for dim in range(feature_dim)) else Replicate()
        for placement in hidden.placements
    ]
    # Each rank has only its rows' contribution to the weight's gradient.
    partial: list[Placement] = [Partial() if row.is_shard() else Replicate() for row in rows]
    full_weight = weight.redistribute(mesh, [Replicate()] * len(rows))
    return rows, [
        hidden.redistribute(mesh, rows).to_local(grad_placements=rows),
        full_weight.to_local(grad_placements=partial),
        targets.redistribute(mesh, rows).to_local(),
    ]


def _from_local(local: Tensor, rows: Sequence["Placement"], like: Tensor) -> Tensor:
    """Build a DTensor with the shape of `like` from this rank's rows."""
    from torch.distributed.tensor import DTensor

    stride = tuple(like.new_empty(like.shape, device="meta").stride())
    mesh = _as_dtensor(like).device_mesh
    return DTensor.from_local(
        local.contiguous(), mesh, rows, run_check=False, shape=like.shape, stride=stride
    )


def _check(contract: Contract, tensors: Sequence[Tensor]) -> None:
    """Check that all tensors are DTensors on one mesh."""
    dtensor = next(tensor for tensor in tensors if getattr(tensor, "placements", None) is not None)
    mesh = _as_dtensor(dtensor).device_mesh
    for argument, tensor in zip(contract.arguments, tensors, strict=True):
        tensor_mesh = getattr(tensor, "device_mesh", None)
        names = contract.name, argument.name
        if tensor_mesh is None:
            raise ArgumentError(*names, "a plain tensor", f"a DTensor on {mesh}")
        if tensor_mesh != mesh:
            raise ArgumentError(*names, f"a DTensor on {tensor_mesh}", f"on {mesh} like the others")


def _as_dtensor(tensor: Tensor) -> "DTensor":
    dtensor: Any = tensor
    return dtensor  # type: ignore[no-any-return]  # checked by `_check`; avoids importing DTensor
