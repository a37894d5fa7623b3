"""Engine state as a flat dict for torch.distributed.checkpoint."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.trainable import Trainable
from ms_parallel.errors import CheckpointError
from ms_parallel.split.part import local_part, wrap_like

UPDATE_COUNT, STEP, SCALE = "optimizer.taken", "engine.step", "engine.loss_scale"


def state_of(trained: Trainable, step: int, extra_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by name, moments as `optimizer.MOMENT.NAME`, and `extra_state`.

    Tensors share the engine's storage. A tied copy is stored under its owner's name on every stage
    that has a copy; the checkpoint planner deduplicates equal parts.

    Args:
        trained: parameters and their optimizer.
        step: number of steps performed.
        extra_state: other tensors to save by name, such as expert counts.
    """
    owners = {copy: owner for owner, copy in trained.plan.tied}
    state: dict[str, Tensor] = dict(extra_state)
    for own_name, parameter in trained.parameters.items():
        # Owner and copy may both be on this process; their values are equal.
        state.setdefault(owners.get(own_name, own_name), parameter.detach())
    for moment, tensors in trained.optimizer.moments.items():
        for own_name, tensor in tensors.items():
            name = f"optimizer.{moment}.{owners.get(own_name, own_name)}"
            state.setdefault(name, wrap_like(trained.parameters[own_name], tensor))
    for moment, tensors in trained.optimizer.unsharded.items():
        for own_name, tensor in tensors.items():
            state.setdefault(f"optimizer.{moment}.{owners.get(own_name, own_name)}", tensor)
    state[UPDATE_COUNT] = torch.tensor(trained.optimizer.update_count, dtype=torch.int64)
    state[STEP] = torch.tensor(step, dtype=torch.int64)
    return state


@torch.no_grad()
def align_replicas(
    state: Mapping[str, Tensor],
    trained: Trainable,
    extra_state: Mapping[str, Tensor],
    groups: Groups,
) -> None:
    """Make replicas of weights and optimizer state equal across devices of different kinds.

    Each kind of device rounds updates differently, so replicas drift apart, and a checkpoint stores
    only one replica. Copying that replica to all processes makes the current run equal to a run
    resumed from the checkpoint. All processes call it; it does nothing if all devices are of one
    kind.
    """
    if groups.kinds is None:
        return
    # Counters and expert state are equal on all ranks already.
    names = sorted(state.keys() - extra_state.keys() - {UPDATE_COUNT, STEP})
    for name in names:
        groups.kinds.align(local_part(state[name]))
    first, last = trained.placement[0], trained.placement[-1]
    pipeline_rank, group = groups.place.pipeline, groups.group("pipeline")
    # The stages of a tied pair may be on different kinds of devices; the checkpoint stores the
    # first stage's weight, so the last stage receives it.
    for owner, _ in trained.plan.tied if first != last and pipeline_rank in (first, last) else ():
        for name in (
            candidate
            for candidate in names
            if candidate == owner or candidate.endswith(f".{owner}")
        ):
            host = local_part(state[name]).to(groups.message_device)
            if pipeline_rank == first:
                dist.send(host, groups.peer("pipeline", last), group=group)
            else:
                dist.recv(host, groups.peer("pipeline", first), group=group)
                local_part(state[name]).copy_(host)
    _refresh_copies(trained)


@torch.no_grad()
def load_state(
    trained: Trainable, state: Mapping[str, Tensor], extra_state: Mapping[str, Tensor]
) -> int:
    """Load a dict as returned by `state_of` under the same layout.

    Returns:
        The step at which it was saved.

    Raises:
        CheckpointError: names or shapes differ from this engine's.
    """
    # Holds the engine's own tensors, which the loop below fills in place.
    expected = state_of(trained, 0, extra_state)
    missing, unknown = (
        sorted(expected.keys() - state.keys()),
        sorted(state.keys() - expected.keys()),
    )
    if missing or unknown:
        problem = f"lacks {missing[0]!r}" if missing else f"has unknown {unknown[0]!r}"
        raise CheckpointError(f"the state {problem}; it is from another model or another stage")
    for name, tensor in expected.items():
        target, source = local_part(tensor), local_part(state[name])
        if target.shape != source.shape:
            raise CheckpointError(
                f"{name} must have shape {tuple(target.shape)} on this process, got"
                f" {tuple(source.shape)}; load the state through torch.distributed.checkpoint"
            )
        if target.data_ptr() != source.data_ptr():  # a checkpoint may be read into our own storage
            target.copy_(source)
    trained.optimizer.update_count = int(state[UPDATE_COUNT])
    _refresh_copies(trained)
    return int(state[STEP])


def _refresh_copies(trained: Trainable) -> None:
    """Copy loaded weights and optimizer state to tied copies that are on the same process."""
    for owner, copy in trained.plan.tied:
        if owner in trained.parameters and copy in trained.parameters:
            local_part(trained.parameters[copy]).copy_(local_part(trained.parameters[owner]))
            for moments in (trained.optimizer.moments, trained.optimizer.unsharded):
                for tensors in moments.values():
                    if owner in tensors and copy in tensors:
                        tensors[copy].copy_(tensors[owner])
