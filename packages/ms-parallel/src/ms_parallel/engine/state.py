"""An engine's state as one flat dict that torch.distributed.checkpoint saves and loads."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ms_parallel.engine.trainable import Trainable
from ms_parallel.errors import CheckpointError
from ms_parallel.split.part import laid_out_like, local_part

MOMENTS = ("optimizer.exp_avg.", "optimizer.exp_avg_sq.")
TAKEN, STEP = "optimizer.taken", "engine.step"


def state_of(trained: Trainable, step: int, beside: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under their own names, moments under `optimizer.exp_avg.NAME` and the like.

    What is given `beside` them, such as the load of experts, comes under its own names.

    Tensors share the engine's storage. A tied copy goes under its owner's name, on each stage
    that holds one: the planner keeps one of equal parts.
    """
    owners = {copy: owner for owner, copy in trained.plan.tied}
    state: dict[str, Tensor] = dict(beside)
    for own_name, parameter in trained.parameters.items():
        name = owners.get(own_name, own_name)
        if name in state:
            continue
        state[name] = parameter.detach()
        for prefix, moment in zip(MOMENTS, trained.optimizer.moments[own_name], strict=True):
            state[prefix + name] = laid_out_like(parameter, moment)
    state[TAKEN] = torch.tensor(trained.optimizer.taken, dtype=torch.int64)
    state[STEP] = torch.tensor(step, dtype=torch.int64)
    return state


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
    """Where one process holds an owner and its tied copy, only the owner was loaded."""
    for owner, copy in trained.plan.tied:
        if owner in trained.parameters and copy in trained.parameters:
            local_part(trained.parameters[copy]).copy_(local_part(trained.parameters[owner]))
            moments = trained.optimizer.moments
            for target, source in zip(moments[copy], moments[owner], strict=True):
                target.copy_(source)
