"""Gradient reduction between the backward pass and the optimizer, for any layout."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.models.plan import ModelPlan
from ms_parallel.split.part import local_gradient
from ms_parallel.torch_private import foreach_mul_, foreach_norm

BUCKET_BYTES = 32 << 20
"""Size at which gradients are sent as one message; a single larger gradient is not split."""


def reduce_gradients(
    parameters: Mapping[str, Tensor],
    replicated: Collection[str],
    unsharded: Mapping[str, str],
    tied: Sequence[tuple[str, str]],
    placement: Sequence[int],
    groups: Groups,
) -> dict[str, Tensor]:
    """Reduce the gradients of the global batch and return this process's shards by name.

    FSDP has already summed over the ranks that shard weights. This sums over these ranks for
    parameters that FSDP does not manage, over replicas of shards, over tensor ranks for parameters
    replicated there, and over the two stages of tied weights.

    Args:
        parameters: parameters of this process's stages.
        replicated: names of the parameters that are replicated over tensor ranks.
        unsharded: axis to sum over, by name, of the parameters that FSDP does not manage.
        tied: pairs (owner, copy) of names of the same weight.
        placement: pipeline rank of each stage.
        groups: process groups of the layout.
    """
    gradients = {name: local_gradient(parameter) for name, parameter in parameters.items()}
    for axis in sorted(set(unsharded.values())):
        sum_over(axis, [gradients[name] for name in unsharded if unsharded[name] == axis], groups)
    if groups.replicas is not None:
        sum_over("replicas", list(gradients.values()), groups)
    sum_over_tensor([gradients[name] for name in replicated], groups)
    add_tied(gradients, tied, placement, groups)
    return gradients


def add_tied(
    gradients: Mapping[str, Tensor],
    tied: Sequence[tuple[str, str]],
    placement: Sequence[int],
    groups: Groups,
) -> None:
    """Sum the gradients of tied weights over their two stages, in place.

    Args:
        gradients: local shards by name.
        tied: as in `reduce_gradients`.
        placement: pipeline rank of each stage.
        groups: process groups of the layout.
    """
    first, last = placement[0], placement[-1]
    for owner, copy in tied if len(placement) > 1 else ():
        if first == last == groups.place.pipeline:  # both stages are on this rank
            gradients[owner] += gradients[copy]
            # Both copies get the sum, so the optimizer keeps them equal.
            gradients[copy].copy_(gradients[owner])
        elif owner in gradients:
            sum_tied(gradients[owner], last, groups)
        elif copy in gradients:
            sum_tied(gradients[copy], first, groups)


def is_counted(name: str, plan: ModelPlan, placement: Sequence[int], groups: Groups) -> bool:
    """Whether this process's shard counts toward the global norm, i.e. is not a replica."""
    # Replicated over tensor ranks: only the first counts it.
    if groups.place.tensor > 0 and plan.split_dim(name) is None:
        return False
    # After `add_tied` the copy has its owner's gradient.
    return not (len(placement) > 1 and name in {copy for _, copy in plan.tied})


def sum_over_tensor(gradients: Sequence[Tensor], groups: Groups) -> None:
    """Sum gradients of replicated parameters over tensor ranks, in place."""
    if groups.layout.tensor > 1:
        sum_over("tensor", gradients, groups)


def sum_over(axis: str, gradients: Sequence[Tensor], groups: Groups) -> None:
    """All-reduce gradients in place, in buckets that bound the extra memory."""
    for indices in bucket_ranges([gradient.nbytes for gradient in gradients]):
        bucket = [gradients[index] for index in indices]
        flat = torch.cat([gradient.flatten() for gradient in bucket])  # (elements of the bucket,)
        groups.all_reduce(flat, axis)
        sizes = [gradient.numel() for gradient in bucket]
        # Copied back, because the optimizer and FSDP use the gradients' own storage.
        for gradient, total in zip(bucket, torch.split(flat, sizes), strict=True):
            gradient.copy_(total.view_as(gradient))


def bucket_ranges(sizes_bytes: Sequence[int]) -> Iterator[range]:
    """Yield index ranges of the gradients that `sum_over` sends as one message."""
    first = size = 0
    for index, nbytes in enumerate(sizes_bytes, 1):
        size += nbytes
        if index == len(sizes_bytes) or size >= BUCKET_BYTES:
            yield range(first, index)
            first, size = index, 0


def sum_tied(gradient: Tensor, peer: int, groups: Groups) -> None:
    """Add pipeline rank `peer`'s gradient of the same tied weight, in place.

    Both ranks add the same two numbers, so the copies stay bitwise equal.
    """
    local = gradient.to(groups.message_device)
    remote = torch.empty_like(local)
    rank, group = groups.peer("pipeline", peer), groups.group("pipeline")
    # Posted as one batch: two blocking sends would wait for each other.
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, local, rank, group), dist.P2POp(dist.irecv, remote, rank, group)]
    )
    for work in works:
        work.wait()
    gradient += remote.to(gradient.device)


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of all elements, a float32 scalar."""
    if not gradients:
        return torch.zeros((), device=device)
    norms = foreach_norm(list(gradients))
    return torch.stack(norms).float().square().sum()


def scale(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply gradients by a factor, in place."""
    foreach_mul_(list(gradients), factor)
