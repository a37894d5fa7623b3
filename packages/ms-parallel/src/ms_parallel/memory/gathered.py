"""Peak size of FSDP2's unsharded weights and gradients, in addition to a process's shards.

An all-gather writes into one flat buffer, from which the weights are copied out. In the forward
pass FSDP2 keeps the buffer until the next all-gather; in the backward pass it prefetches the next
block's weights while a block computes (torch.distributed.fsdp, `_fsdp_param_group.py`).
"""

from collections.abc import Mapping
from itertools import pairwise

from attrs import frozen
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ms_parallel.memory.modes import REDUCE_EACH_MICROBATCH, Sharding
from ms_parallel.torch_private import fsdp_owner, fsdp_parameters, fsdp_shards, fsdp_size

FLOAT32_BYTES = 4


@frozen(kw_only=True)
class UnitWeights:
    """Number of weights in one FSDP unit."""

    count: int
    buffered: int
    """Weights that pass through the all-gather buffer: `count`, or 0 with a single shard."""


@frozen(kw_only=True)
class GatheredStage:
    """FSDP units of a stage, in the order in which the forward pass gathers them."""

    ends: UnitWeights
    """Weights outside the blocks; they stay gathered until the step's last backward pass."""
    blocks: tuple[tuple[UnitWeights, ...], ...]
    """For each block its own unit, then its experts' unit under expert parallelism."""
    linear: int = 0
    """Weights of linear layers, whose gradients a schedule may defer."""

    @property
    def count(self) -> int:
        """Number of weights in all units."""
        return self.ends.count + sum(unit.count for block in self.blocks for unit in block)

    @property
    def block_peak(self) -> int:
        """Peak of weights plus buffer if each block is freed after it runs.

        In the backward pass a block's weights coincide with the buffer of the block before it,
        which is prefetched.
        """
        backward = [
            sum(unit.count for unit in block) + previous[0].buffered
            for previous, block in pairwise(self.blocks)
        ]
        return max([*map(_forward_peak, self.blocks), *backward], default=0)

    @property
    def stage_peak(self) -> int:
        """Peak of weights plus buffer, at the end of a forward pass that frees nothing."""
        last_block = 0
        if self.blocks:
            *previous, last = self.blocks
            freed_never = sum(unit.count for block in previous for unit in block)
            last_block = freed_never + _forward_peak(last)
        return self.ends.count + max(last_block, self.ends.buffered)


def _forward_peak(block: tuple[UnitWeights, ...]) -> int:
    """Peak in the forward pass: the units gathered so far plus the buffer of the latest."""
    peak = total = 0
    for unit in block:
        total += unit.count
        peak = max(peak, total + unit.buffered)
    return peak


def gathered_stage(stage: nn.Module, *, split_head: bool) -> GatheredStage:
    """Count the weights of a stage's FSDP units; zero if it is not wrapped.

    Args:
        stage: a stage of this process.
        split_head: the head is vocabulary-parallel, so its loss computes the gradient itself.
    """
    ends = UnitWeights(count=0, buffered=0)
    blocks: list[tuple[UnitWeights, ...]] = []
    block_prefix, linear = "", 0
    for name, module in stage.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        if not name:  # the stage itself
            ends = _unit_weights(module)
        elif block_prefix and name.startswith(block_prefix):  # experts within the latest block
            blocks[-1] += (_unit_weights(module),)
        else:
            blocks.append((_unit_weights(module),))
            block_prefix = f"{name}."
        if name or not split_head:
            linear += _linear_weights(module)
    return GatheredStage(ends=ends, blocks=tuple(blocks), linear=linear)


def _unit_weights(module: FSDPModule) -> UnitWeights:
    params = fsdp_parameters(module)
    if not params:
        return UnitWeights(count=0, buffered=0)
    count = sum(map(fsdp_size, params))
    return UnitWeights(count=count, buffered=count if fsdp_shards(module) > 1 else 0)


def _linear_weights(module: FSDPModule) -> int:
    return sum(
        fsdp_size(param)
        for param in fsdp_parameters(module)
        if isinstance(fsdp_owner(param), nn.Linear)
    )


def peak_gathered_weights(
    stages: Mapping[int, GatheredStage],
    sharding: Sharding,
    *,
    pipelined: bool,
    one_microbatch: bool,
    split_backward: bool,
) -> int:
    """Return the peak number of unsharded weights on a process, including all-gather buffers.

    Args:
        stages: the process's stages, in the order in which they first run.
        sharding: sharding mode, which decides when weights are freed.
        pipelined: the layout has a pipeline, where `auto` means `zero1`.
        one_microbatch: a step has one microbatch.
        split_backward: weight gradients are deferred; their weights stay gathered until then.
    """
    all_stages = list(stages.values())
    total = sum(stage.count for stage in all_stages)
    reshards_after_forward = sharding == "zero3" or (sharding == "auto" and not pipelined)
    if reshards_after_forward:
        # The ends of all stages stay gathered; blocks are gathered one at a time.
        ends = sum(stage.ends.count for stage in all_stages)
        peak = max(
            ends + max((stage.block_peak for stage in all_stages), default=0),
            max((stage.ends.count + stage.ends.buffered for stage in all_stages), default=0),
        )
        # `auto` reshards after the forward pass, but after a backward pass only if it is the last.
        stays_gathered = split_backward if sharding == "zero3" else not one_microbatch
        return max(peak, total) if stays_gathered else peak
    # Stages first run in this order, and none is freed before the last has run.
    earlier_stages = peak = 0
    for stage in all_stages:
        peak = max(peak, earlier_stages + stage.stage_peak)
        earlier_stages += stage.count
    return peak


def gradient_bytes(
    stages: Mapping[int, GatheredStage],
    sharding: Sharding,
    *,
    one_microbatch: bool,
    split_backward: bool,
    element_bytes: int,
) -> int:
    """Return the bytes of unsharded gradients, accumulated and from one backward pass.

    Gradients of a full backward pass are reduced block by block; only deferred weight gradients
    exist for a stage all at once.

    Args:
        stages: the process's stages.
        sharding: sharding mode, which decides when gradients are reduce-scattered.
        one_microbatch: a step has one microbatch.
        split_backward: weight gradients are deferred.
        element_bytes: size of the compute dtype; gradients are accumulated in float32.
    """
    all_stages = stages.values()
    if sharding in REDUCE_EACH_MICROBATCH or one_microbatch:
        largest = max((stage.count for stage in all_stages), default=0)
        return largest * FLOAT32_BYTES if split_backward else 0
    accumulated = sum(stage.count for stage in all_stages) * FLOAT32_BYTES
    if not split_backward or element_bytes == FLOAT32_BYTES:  # accumulated in place
        return accumulated
    return accumulated + max((stage.linear for stage in all_stages), default=0) * element_bytes
