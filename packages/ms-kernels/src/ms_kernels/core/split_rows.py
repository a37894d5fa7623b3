"""Runs operators on each process's own part of DTensors, and puts the results together.

This is for operators whose rule does not follow from the names of dims
(`ms_kernels.core.sharding`): a mean loss is divided by the rows of all processes, and each process
that holds some features of tokens sorts all of them. Rows of hidden stay where they are; what else
is split, such as a weight over its classes, is gathered first.
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
    """Return whether a DTensor is among `tensors`; import nothing where there is none."""
    return any(getattr(each, "placements", None) is not None for each in tensors)


def rows_mapped(contract: Contract, tensors: Sequence[Tensor], run: Callable[..., Any]) -> Any:
    """Return a result a row, or a pair of them, placed as the rows of the first tensor are.

    Args:
        contract: the operator's.
        tensors: hidden (..., H), weight (V, H) and tokens (...).
        run: takes what this process holds of them.

    Raises:
        ArgumentError: when one is no DTensor, or on another mesh.
    """
    rows, parts = _own_rows(contract, tensors)
    found = run(*parts)
    if isinstance(found, tuple):
        return tuple(_whole(each, rows, tensors[2]) for each in found)
    return _whole(found, rows, tensors[2])


def rows_reduced(
    contract: Contract,
    tensors: Sequence[Tensor],
    run: Callable[..., Tensor],
    *,
    mean_over: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Return the sum of rows' results over all processes, on each of them.

    Args:
        contract: the operator's.
        tensors: hidden (..., H), weight (V, H) and targets (...).
        run: takes what this process holds of them and returns its sum.
        mean_over: counts the rows among this process's targets that a mean is over; None for a sum.

    Raises:
        ArgumentError: when one is no DTensor, or on another mesh.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    rows, parts = _own_rows(contract, tensors)
    mesh = _placed(tensors[0]).device_mesh
    sums = [Partial() if each.is_shard() else Replicate() for each in rows]

    def everywhere(own: Tensor) -> DTensor:
        made = DTensor.from_local(own, mesh, sums, run_check=False)
        return made.redistribute(mesh, [Replicate()] * len(rows))

    total = everywhere(run(*parts))
    # Summed over processes first: one of them may have no target that counts.
    return total if mean_over is None else total / everywhere(mean_over(parts[2])).clamp(min=1)


def permuted(
    contract: Contract, tensors: Sequence[Tensor], run: Callable[..., Sequence[Tensor]]
) -> Any:
    """Return sorted rows split over features as x is, and counts and places on every process.

    Args:
        contract: the operator's.
        tensors: x (T, H) and experts (T, C).
        run: takes what this process holds of them.

    Raises:
        ArgumentError: when one is no DTensor, or on another mesh.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    _check(contract, tensors)
    x, experts = (_placed(each) for each in tensors)
    whole = [Replicate()] * len(x.placements)
    kept = [each if each.is_shard(1) else Replicate() for each in x.placements]
    own = x.redistribute(x.device_mesh, kept).to_local(grad_placements=kept)
    rows, *counted = run(own, experts.redistribute(x.device_mesh, whole).to_local())
    count = experts.shape[0] * experts.shape[1]
    features = [Shard(1) if each.is_shard() else each for each in kept]
    shape, stride = torch.Size((count, x.shape[1])), (x.shape[1], 1)
    made = DTensor.from_local(
        rows.contiguous(), x.device_mesh, features, run_check=False, shape=shape, stride=stride
    )
    others = (DTensor.from_local(each, x.device_mesh, whole, run_check=False) for each in counted)
    return (made, *others)


def own_parts(contract: Contract, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return what this process holds of DTensors that are split alike; others as they are."""
    first = getattr(tensors[0], "placements", None)
    if first is None:
        return tensors
    for argument, tensor in zip(contract.arguments, tensors, strict=True):
        placed = getattr(tensor, "placements", None)
        if placed != first or any(each.is_partial() for each in placed):
            fits = f"split over processes as {contract.arguments[0].name} is: {first}, no sum"
            raise ArgumentError(contract.name, argument.name, f"placed as {placed}", fits)
    with torch.no_grad():
        return tuple(tensor.to_local() for tensor in tensors)  # type: ignore[attr-defined]


def _own_rows(
    contract: Contract, tensors: Sequence[Tensor]
) -> tuple[list["Placement"], list[Tensor]]:
    """Return how rows are split, and this process's part: rows, the whole weight, their targets."""
    from torch.distributed.tensor import Partial, Replicate

    _check(contract, tensors)
    hidden, weight, targets = (_placed(each) for each in tensors)
    mesh, features = hidden.device_mesh, hidden.ndim - 1
    rows: list[Placement] = [
        each if any(each.is_shard(dim) for dim in range(features)) else Replicate()
        for each in hidden.placements
    ]
    # Each process adds its own rows' share of the weight's gradient.
    shares: list[Placement] = [Partial() if each.is_shard() else Replicate() for each in rows]
    whole = weight.redistribute(mesh, [Replicate()] * len(rows))
    return rows, [
        hidden.redistribute(mesh, rows).to_local(grad_placements=rows),
        whole.to_local(grad_placements=shares),
        targets.redistribute(mesh, rows).to_local(),
    ]


def _whole(own: Tensor, rows: Sequence["Placement"], like: Tensor) -> Tensor:
    """Return what the parts of a tensor of the shape of `like` are together."""
    from torch.distributed.tensor import DTensor

    stride = tuple(like.new_empty(like.shape, device="meta").stride())
    mesh = _placed(like).device_mesh
    return DTensor.from_local(
        own.contiguous(), mesh, rows, run_check=False, shape=like.shape, stride=stride
    )


def _check(contract: Contract, tensors: Sequence[Tensor]) -> None:
    """Refuse plain tensors among DTensors, and two meshes."""
    known = next(each for each in tensors if getattr(each, "placements", None) is not None)
    mesh = _placed(known).device_mesh
    for argument, each in zip(contract.arguments, tensors, strict=True):
        own = getattr(each, "device_mesh", None)
        named = contract.name, argument.name
        if own is None:
            raise ArgumentError(*named, "a plain tensor", f"a DTensor on {mesh}")
        if own != mesh:
            raise ArgumentError(*named, f"a DTensor on {own}", f"on {mesh}, as others are")


def _placed(tensor: Tensor) -> "DTensor":
    placed: Any = tensor
    found: DTensor = placed
    return found
