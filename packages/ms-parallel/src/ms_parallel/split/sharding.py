"""Shards weights, gradients and moments with FSDP2 over processes that hold different tokens."""

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from ms_parallel.cluster.groups import Groups
from ms_parallel.models.plan import ModelPlan
from ms_parallel.split.precision import precision_policy
from ms_parallel.split.precision_choice import MixedPrecision


def shard_model(
    model: nn.Module, plan: ModelPlan, groups: Groups, *, mixed_precision: MixedPrecision
) -> None:
    """Wrap each block, then the rest, in place. Gradients are summed over ranks, not averaged.

    With one such process in float32 nothing is wrapped, and nothing is paid. Under a pipeline,
    gathered weights are kept from the first microbatch to the last.
    """
    if groups.layout.token_ranks == 1 and not mixed_precision:
        return
    settings = {
        "mesh": groups.tokens,
        "mp_policy": precision_policy(mixed_precision),
        "reshard_after_forward": groups.layout.pipeline == 1,
    }
    blocks = [
        module
        for name, module in model.named_modules()
        if plan.is_block(name) and any(True for _ in module.parameters())
    ]
    for module in [*blocks, model]:
        if module is model:
            settings["reshard_after_forward"] = False  # the loss still needs the head
        wrapped = fully_shard(module, **settings)  # type: ignore[call-overload]
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)


def gather_weights(model: nn.Module) -> None:
    """Begin to gather sharded weights; the next forward or backward waits for them."""
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()  # before the first forward there are no streams yet
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard(async_op=True)


def set_last_backward(model: nn.Module, last: bool) -> None:
    """Say whether the next backward is the step's last, the one that sums over the data axis."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


def after_weight_gradients(model: nn.Module, last: bool) -> None:
    """Do what FSDP does at the end of a backward, for gradients that were added outside of one.

    Args:
        model: the stage whose weights' gradients were put off, and are now added.
        last: whether they were the step's last, so that they are to be summed over the data axis.
    """
    if isinstance(model, FSDPModule):
        set_last_backward(model, last)
        model._get_fsdp_state()._root_post_backward_final_callback()
