"""How many bytes FSDP2 holds at once beside a process's shares: whole weights, whole gradients.

What a collective has gathered lies in one buffer, from which weights are copied out. In a forward
FSDP2 keeps the buffer until the next weights are gathered; in a backward it gathers those that
come next while a block computes (torch.distributed.fsdp, `_fsdp_param_group.py`).
"""

from collections.abc import Mapping
from itertools import pairwise

from attrs import frozen
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ms_parallel.split.data_axis import EACH, Sharding
from ms_parallel.torch_private import fsdp_owner, fsdp_parameters, fsdp_shards, fsdp_size

FLOAT32_BYTES = 4


@frozen(kw_only=True)
class WholeWeights:
    """Numbers of weights that are gathered together, all of them and those through a buffer."""

    count: int
    buffered: int
    """0 where one process has them all and there is nothing to gather."""


@frozen(kw_only=True)
class GatheredStage:
    """The weights of a stage in the order in which its forward gathers them."""

    ends: WholeWeights
    """Those of no block, which stay until the update's last backward."""
    blocks: tuple[tuple[WholeWeights, ...], ...]
    """Each block's own, and behind them its experts' where they are shared out."""
    linear: int = 0
    """Those of linear maps, whose gradients a schedule may put off."""

    @property
    def count(self) -> int:
        """All weights."""
        return self.ends.count + sum(part.count for block in self.blocks for part in block)

    @property
    def most_of_a_block(self) -> int:
        """Weights and buffer of the block that has most, if each is freed when it has run.

        Backwards gather what comes before a block while it computes.
        """
        backwards = [
            sum(part.count for part in block) + before[0].buffered
            for before, block in pairwise(self.blocks)
        ]
        return max([*map(_most, self.blocks), *backwards], default=0)

    @property
    def most_of_all(self) -> int:
        """Weights and buffer at the end of a forward that frees none."""
        late = 0
        if self.blocks:
            *before, last = self.blocks
            late = sum(part.count for block in before for part in block) + _most(last)
        return self.ends.count + max(late, self.ends.buffered)


def _most(block: tuple[WholeWeights, ...]) -> int:
    """Count what a forward holds at most: the parts gathered so far and the last one's buffer."""
    most = held = 0
    for part in block:
        held += part.count
        most = max(most, held + part.buffered)
    return most


def gathered_stage(stage: nn.Module, *, split_head: bool) -> GatheredStage:
    """Count what FSDP2 gathers of a stage; nothing where it is not wrapped.

    Args:
        stage: of this process.
        split_head: whether tensor ranks share out the head, whose loss forms its gradient itself.
    """
    ends = WholeWeights(count=0, buffered=0)
    blocks: list[tuple[WholeWeights, ...]] = []
    inside, linear = "", 0
    for name, module in stage.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        if not name:  # the stage itself
            ends = _weights_of(module)
        elif inside and name.startswith(inside):
            blocks[-1] += (_weights_of(module),)
        else:
            blocks.append((_weights_of(module),))
            inside = f"{name}."
        if name or not split_head:
            linear += _linear(module)
    return GatheredStage(ends=ends, blocks=tuple(blocks), linear=linear)


def _weights_of(module: FSDPModule) -> WholeWeights:
    parameters = fsdp_parameters(module)
    if not parameters:
        return WholeWeights(count=0, buffered=0)
    count = sum(map(fsdp_size, parameters))
    return WholeWeights(count=count, buffered=count if fsdp_shards(module) > 1 else 0)


def _linear(module: FSDPModule) -> int:
    return sum(
        fsdp_size(each)
        for each in fsdp_parameters(module)
        if isinstance(fsdp_owner(each), nn.Linear)
    )


def most_weights(
    stages: Mapping[int, GatheredStage], sharding: Sharding, *, piped: bool, once: bool, split: bool
) -> int:
    """Count the weights that a process holds at most, with those in buffers, in numbers.

    Args:
        stages: of the process, in the order in which they first run.
        sharding: when weights are freed.
        piped: whether the layout has a pipeline, under which `auto` frees as `zero1`.
        once: whether an update has one microbatch.
        split: whether gradients of weights are put off, until when their weights stay.
    """
    every = list(stages.values())
    whole = sum(stage.count for stage in every)
    freed_forwards = sharding == "zero3" or (sharding == "auto" and not piped)
    if freed_forwards:
        ends = sum(stage.ends.count for stage in every)
        most = max(
            ends + max((stage.most_of_a_block for stage in every), default=0),
            max((stage.ends.count + stage.ends.buffered for stage in every), default=0),
        )
        stays = split if sharding == "zero3" else not once
        return max(most, whole) if stays else most
    before = most = 0
    for stage in every:
        most = max(most, before + stage.most_of_all)
        before += stage.count
    return most


def gradient_bytes(
    stages: Mapping[int, GatheredStage],
    sharding: Sharding,
    *,
    once: bool,
    split: bool,
    element_bytes: int,
) -> int:
    """Count the bytes of whole gradients: those added up so far, and those of one backward.

    Only where gradients of weights are put off is all that a backward gives there at once.

    Args:
        stages: of the process.
        sharding: when gradients are summed and scattered.
        once: whether an update has one microbatch.
        split: whether gradients of weights are put off.
        element_bytes: of a number that is computed with; sums of gradients are in float32.
    """
    every = stages.values()
    if sharding in EACH or once:
        return max((stage.count for stage in every), default=0) * FLOAT32_BYTES if split else 0
    added = sum(stage.count for stage in every) * FLOAT32_BYTES
    if not split or element_bytes == FLOAT32_BYTES:  # one tensor takes both
        return added
    return added + max((stage.linear for stage in every), default=0) * element_bytes
