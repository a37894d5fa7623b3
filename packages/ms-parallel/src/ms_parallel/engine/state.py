"""An engine's state as one flat dict that torch.distributed.checkpoint saves and loads."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ms_parallel.errors import CheckpointError
from ms_parallel.split.part import laid_out_like, local_part

if TYPE_CHECKING:
    from ms_parallel.engine.engine import Engine

__all__ = ["load_state", "state_of"]

MOMENTS = ("optimizer.exp_avg.", "optimizer.exp_avg_sq.")
TAKEN, STEP = "optimizer.taken", "engine.step"


def state_of(engine: "Engine") -> dict[str, Tensor]:
    """Weights under their own names, moments under `optimizer.exp_avg.NAME` and the like.

    Tensors share the engine's storage. A tied copy goes under its owner's name, on each stage
    that holds one: the planner keeps one of equal parts.
    """
    owners = {copy: owner for owner, copy in engine.plan.tied}
    state: dict[str, Tensor] = {}
    for own_name, parameter in engine.parameters.items():
        name = owners.get(own_name, own_name)
        if name in state:
            continue
        state[name] = parameter.detach()
        for prefix, moment in zip(MOMENTS, engine.optimizer.moments[own_name], strict=True):
            state[prefix + name] = laid_out_like(parameter, moment)
    state[TAKEN] = torch.tensor(engine.optimizer.taken, dtype=torch.int64)
    state[STEP] = torch.tensor(engine.step, dtype=torch.int64)
    return state


@torch.no_grad()
def load_state(engine: "Engine", state: Mapping[str, Tensor]) -> None:
    """Take over a dict of the form of `state_of` under the same layout.

    Raises:
        CheckpointError: names or shapes are not this engine's.
    """
    own = state_of(engine)
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
    engine.optimizer.taken = int(state[TAKEN])
    engine.step = int(state[STEP])
    _refresh_copies(engine)


def _refresh_copies(engine: "Engine") -> None:
    """Where one process holds an owner and its tied copy, only the owner was loaded."""
    for owner, copy in engine.plan.tied:
        if owner in engine.parameters and copy in engine.parameters:
            local_part(engine.parameters[copy]).copy_(local_part(engine.parameters[owner]))
            moments = engine.optimizer.moments
            for target, source in zip(moments[copy], moments[owner], strict=True):
                target.copy_(source)
