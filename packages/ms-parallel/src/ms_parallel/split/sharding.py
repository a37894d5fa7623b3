"""Sharding of weights, gradients and moments over data-parallel processes with FSDP2."""

from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from ms_parallel.cluster.groups import Groups
from ms_parallel.memory.modes import REDUCE_EACH_MICROBATCH, Sharding
from ms_parallel.models.experts.grouped import Experts
from ms_parallel.models.plan import ModelPlan
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
    """Wrap each block, then the root, with FSDP2 in place. Gradients are summed, not averaged.

    With one data-parallel process in float32 nothing is wrapped. Under expert parallelism, experts
    are wrapped before their block, over the processes with the same experts.
    """
    if groups.layout.shards == 1 and not mixed_precision:
        return
    sharded = groups.layout.shards > 1
    reshard = sharding == "zero3" or (sharding == "auto" and groups.layout.pipeline == 1)
    policy = precision_policy(mixed_precision)
    settings: dict[str, Any] = {
        "mesh": groups.shards,
        "mp_policy": policy,
        "reshard_after_forward": reshard and sharded,  # a single shard would only be cast again
    }
    # Block inputs include tensors that must not be rounded: rotary tables, masks, router weights.
    # The inputs of the root are tokens or pixels, which may be cast.
    block_settings = {**settings, "mp_policy": replace(policy, cast_forward_inputs=False)}
    expert_settings = {
        **block_settings,
        "mesh": groups.expert_shards,
        "shard_placement_fn": lambda weight: Shard(shard_dim(weight, groups.expert_shards.size())),
    }
    for module in _blocks(model, plan):
        # Inner units first, as `fully_shard` excludes parameters of units that are already wrapped.
        for experts in module.modules() if groups.experts is not None else ():
            if isinstance(experts, Experts):
                _wrap(experts, expert_settings)
        _wrap(module, block_settings)
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
    # A single rank has nothing to divide, and a divide factor would cost a pass over gradients.
    if settings["mesh"].size() > 1:
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)


def gather_weights(model: nn.Module) -> None:
    """Start all-gathering sharded weights; the next forward or backward pass waits for them."""
    if isinstance(model, FSDPModule):
        start_fsdp_streams(model)  # streams do not exist before the first forward pass
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard(async_op=True)


def set_last_backward(
    model: nn.Module,
    last: bool,
    sharding: Sharding = "auto",
    *,
    complete: bool = True,
    summed: bool = True,
) -> None:
    """Set whether the next backward pass is the last of the step, which reduces gradients.

    Args:
        model: a stage.
        last: whether the backward pass is the last.
        sharding: sharding mode; some modes reduce after every backward pass.
        complete: whether the backward pass computes all weight gradients and defers none.
        summed: whether gradients are reduced over the data axis at all.
    """
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(
            summed and (last or (complete and sharding in REDUCE_EACH_MICROBATCH))
        )
        model.set_reshard_after_backward(last or (complete and sharding == "zero3"))
        # The root holds the head, which losses of later microbatches still need.
        model.set_reshard_after_backward(last, recurse=False)


def after_weight_gradients(
    model: nn.Module, last: bool, sharding: Sharding = "auto", *, summed: bool = True
) -> None:
    """Run FSDP's end-of-backward work for weight gradients accumulated outside a backward pass.

    Args:
        model: a stage whose deferred weight gradients have been accumulated.
        last: they are the last of the step, so gradients are reduced over the data axis.
        sharding: sharding mode; some modes reduce after every backward pass.
        summed: whether gradients are reduced over the data axis at all.
    """
    if isinstance(model, FSDPModule):
        set_last_backward(model, last, sharding, summed=summed)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _widen_gradients(module)
        end_fsdp_backward(model)


def _widen_gradients(module: FSDPModule) -> None:
    """Cast gradients to the reduction dtype.

    FSDP2 casts in the backward pass that reduces, and expects one dtype for all. Here an earlier
    backward pass has already cast some, such as gradients of norms.
    """
    for param in fsdp_parameters(module):
        if param.unsharded_accumulated_grad is None and gathered_weight(param) is not None:
            param.to_accumulated_grad_if_needed()
