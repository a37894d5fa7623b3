"""An engine's state as one flat dict that torch.distributed.checkpoint saves and loads."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.trainable import Trainable
from ms_parallel.errors import CheckpointError
from ms_parallel.split.part import laid_out_like, local_part

TAKEN, STEP, SCALE = "optimizer.taken", "engine.step", "engine.loss_scale"


def state_of(trained: Trainable, step: int, beside: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Collect weights under their own names, and moments under `optimizer.MOMENT.NAME`.

    What is given `beside` them, such as the load of experts, comes under its own names.

    Tensors share the engine's storage. A tied copy goes under its owner's name, on each stage
    that holds one: the planner keeps one of equal parts.
    """
    owners = {copy: owner for owner, copy in trained.plan.tied}
    state: dict[str, Tensor] = dict(beside)
    for own_name, parameter in trained.parameters.items():
        state.setdefault(owners.get(own_name, own_name), parameter.detach())
    for moment, tensors in trained.optimizer.moments.items():
        for own_name, tensor in tensors.items():
            name = f"optimizer.{moment}.{owners.get(own_name, own_name)}"
            state.setdefault(name, laid_out_like(trained.parameters[own_name], tensor))
    for moment, tensors in trained.optimizer.whole.items():
        for own_name, tensor in tensors.items():
            state.setdefault(f"optimizer.{moment}.{owners.get(own_name, own_name)}", tensor)
    state[TAKEN] = torch.tensor(trained.optimizer.taken, dtype=torch.int64)
    state[STEP] = torch.tensor(step, dtype=torch.int64)
    return state


@torch.no_grad()
def align_kinds(
    state: Mapping[str, Tensor], trained: Trainable, beside: Mapping[str, Tensor], groups: Groups
) -> None:
    """Make equal what processes on unlike devices hold of the same weights and moments.

    Each kind of device rounds updates in its own way, so copies drift apart by rounding errors. A
    checkpoint holds one of them; so that a run that goes on from it is the one that went on, all
    take that one over. All processes call this; where they are of one kind nothing is done.
    """
    if groups.kinds is None:
        return
    names = sorted(state.keys() - beside.keys() - {TAKEN, STEP})
    for name in names:
        groups.kinds.align(local_part(state[name]))
    first, last = trained.placement[0], trained.placement[-1]
    here, group = groups.place.pipeline, groups.group("pipeline")
    for owner, _ in trained.plan.tied if first != last and here in (first, last) else ():
        for name in (each for each in names if each == owner or each.endswith(f".{owner}")):
            host = local_part(state[name]).to(groups.wire)
            if here == first:
                dist.send(host, groups.peer("pipeline", last), group=group)
            else:
                dist.recv(host, groups.peer("pipeline", first), group=group)
                local_part(state[name]).copy_(host)
    _refresh_copies(trained)


@torch.no_grad()
def load_state(
    trained: Trainable, state: Mapping[str, Tensor], beside: Mapping[str, Tensor]
) -> int:
    """Take over a dict of the form of `state_of` under the same layout.

    Returns:
        The step that it was taken at.

    Raises:
        CheckpointError: names or shapes are not this engine's.
    """
    own = state_of(trained, 0, beside)
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unknown:
        problem = f"lacks {missing[0]!r}" if missing else f"has unknown {unknown[0]!r}"
        raise CheckpointError(f"the state {problem}; it is of another model or another stage")
    for name, tensor in own.items():
        target, source = local_part(tensor), local_part(state[name])
        if target.shape != source.shape:
            raise CheckpointError(
                f"{name}: this process holds {tuple(target.shape)}, the state "
                f"{tuple(source.shape)}; load it through torch.distributed.checkpoint"
            )
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)
    trained.optimizer.taken = int(state[TAKEN])
    _refresh_copies(trained)
    return int(state[STEP])


def _refresh_copies(trained: Trainable) -> None:
    """Copy a loaded owner, and its state, to its tied copy where one process holds both."""
    for owner, copy in trained.plan.tied:
        if owner in trained.parameters and copy in trained.parameters:
            local_part(trained.parameters[copy]).copy_(local_part(trained.parameters[owner]))
            for moments in (trained.optimizer.moments, trained.optimizer.whole):
                for tensors in moments.values():
                    if owner in tensors and copy in tensors:
                        tensors[copy].copy_(tensors[owner])
