"""Sharding of weights, gradients and moments over data-parallel processes with FSDP2."""

from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from ms_parallel.cluster.groups import Groups
from ms_parallel.models.experts.grouped import Experts
from ms_parallel.models.plan import ModelPlan
from ms_parallel.split.data_axis import EACH, Sharding
from ms_parallel.split.expert_parallel import shard_dim
from ms_parallel.split.precision import cast_hidden_states, precision_policy
from ms_parallel.split.precision_choice import MixedPrecision
from ms_parallel.torch_private import (
    end_fsdp_backward,
    fsdp_parameters,
    gathered_weight,
    start_fsdp_streams,
)


def shard_model(
    model: nn.Module,
    plan: ModelPlan,
    groups: Groups,
    *,
    mixed_precision: MixedPrecision,
    sharding: Sharding = "auto",
) -> None:
    """Wrap each block, then the root, in place. Gradients are summed over ranks, not averaged.

    With one data-parallel process in float32 nothing is wrapped. Under expert parallelism, experts
    are wrapped before their block, over the processes with the same experts.
    """
    if groups.layout.shards == 1 and not mixed_precision:
        return
    sharded = groups.layout.shards > 1
    freed = sharding == "zero3" or (sharding == "auto" and groups.layout.pipeline == 1)
    policy = precision_policy(mixed_precision)
    settings: dict[str, Any] = {
        "mesh": groups.shards,
        "mp_policy": policy,
        "reshard_after_forward": freed and sharded,  # one process would only cast weights again
    }
    # Block inputs include tensors that must not be rounded: rotary tables, masks, router weights.
    # The inputs of the root are tokens or pixels, which may be cast.
    inner = {**settings, "mp_policy": replace(policy, cast_forward_inputs=False)}
    own = {
        **inner,
        "mesh": groups.expert_shards,
        "shard_placement_fn": lambda weight: Shard(shard_dim(weight, groups.expert_shards.size())),
    }
    for module in _blocks(model, plan):
        for experts in module.modules() if groups.experts is not None else ():
            if isinstance(experts, Experts):
                _wrap(experts, own)
        _wrap(module, inner)
        if policy.param_dtype is not None:
            cast_hidden_states(module, policy.param_dtype)
    _wrap(model, {**settings, "reshard_after_forward": False})  # the loss still needs the head


def _blocks(model: nn.Module, plan: ModelPlan) -> list[nn.Module]:
    return [
        module
        for name, module in model.named_modules()
        if plan.is_block(name) and any(True for _ in module.parameters())
    ]


def _wrap(module: nn.Module, settings: dict[str, Any]) -> None:
    wrapped: Any = fully_shard(module, **settings)
    if settings["mesh"].size() > 1:  # else FSDP divides nothing; a factor would cost a pass
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)


def gather_weights(model: nn.Module) -> None:
    """Start all-gathering sharded weights; the next forward or backward pass waits for them."""
    if isinstance(model, FSDPModule):
        start_fsdp_streams(model)  # before the first forward there are no streams yet
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard(async_op=True)


def set_last_backward(
    model: nn.Module,
    last: bool,
    sharding: Sharding = "auto",
    *,
    whole: bool = True,
    summed: bool = True,
) -> None:
    """Set whether the next backward pass is the last of the step, which reduces gradients.

    Args:
        model: a stage.
        last: whether the backward pass is the last.
        sharding: sharding mode; some modes reduce after every backward pass.
        whole: whether the backward pass computes all weight gradients, with none delayed.
        summed: whether gradients are reduced over the data axis at all.
    """
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(summed and (last or (whole and sharding in EACH)))
        model.set_reshard_after_backward(last or (whole and sharding == "zero3"))
        # The losses of microbatches that have passed forwards wait for the head.
        model.set_reshard_after_backward(last, recurse=False)


def after_weight_gradients(
    model: nn.Module, last: bool, sharding: Sharding = "auto", *, summed: bool = True
) -> None:
    """Do what FSDP does at the end of a backward, for gradients that were added outside of one.

    Args:
        model: the stage whose weights' gradients were put off, and are now added.
        last: whether they were the step's last, so that they are to be summed over the data axis.
        sharding: which may sum after each.
        summed: whether they are summed at all.
    """
    if isinstance(model, FSDPModule):
        set_last_backward(model, last, sharding, summed=summed)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _widen_gradients(module)
        end_fsdp_backward(model)


def _widen_gradients(module: FSDPModule) -> None:
    """Take gradients to the dtype in which they are summed.

    FSDP2 leaves that to the backward that sums, and there all have one dtype. Here some have been
    widened already behind an earlier backward, such as those of norms.
    """
    for each in fsdp_parameters(module):
        if each.unsharded_accumulated_grad is None and gathered_weight(each) is not None:
            each.to_accumulated_grad_if_needed()
