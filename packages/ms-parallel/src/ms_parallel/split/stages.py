"""Cuts a model into pipeline stages, and builds a stage split and sharded."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import nn

from ms_parallel.cluster.groups import Groups
from ms_parallel.errors import LayoutError
from ms_parallel.memory.modes import Recompute, Sharding
from ms_parallel.memory.recompute import recompute_blocks
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.decoder import Decoder
from ms_parallel.models.registry import build_model, model_plan
from ms_parallel.models.staged import StagedModel
from ms_parallel.operators.protocol import Ops
from ms_parallel.split.expert_parallel import split_experts
from ms_parallel.split.precision import compute_in
from ms_parallel.split.precision_choice import MixedPrecision, precision_name
from ms_parallel.split.sharding import shard_model
from ms_parallel.split.tensor_parallel import split_model


def cut_layers(
    layers: int, stages: int, cuts: Sequence[int], split: Sequence[int] | None = None
) -> list[range]:
    """Cut layers into stages by `split`, or as evenly as `cuts` allow.

    Leftover layers go to the first stages, since the last one also has the head.

    Args:
        layers: number of layers of the model.
        stages: number of stages.
        cuts: layer indices at which a stage may start.
        split: number of layers per stage; None for an even split.

    Raises:
        LayoutError: there are fewer cuts than stages, or the split does not match.
    """
    if split is not None:
        return _cut_by_split(layers, stages, cuts, split)
    if stages > len(cuts):
        raise LayoutError(
            f"the model can be split into at most {len(cuts)} pipeline stages, got {stages}; use"
            f" at most {len(cuts)}"
        )
    starts: list[int] = []
    for stage in range(stages):
        # Rounded up, so that leftover layers go to the first stages.
        ideal = -(-layers * stage // stages)
        # Leave at least one cut for each earlier and later stage.
        earliest = stage if not starts else cuts.index(starts[-1]) + 1
        latest = len(cuts) - (stages - stage)
        starts.append(min(cuts[earliest : latest + 1], key=lambda cut: abs(cut - ideal)))
    return [range(a, b) for a, b in zip(starts, [*starts[1:], layers], strict=True)]


def _cut_by_split(
    layers: int, stages: int, cuts: Sequence[int], split: Sequence[int]
) -> list[range]:
    ends = list(accumulate(split))
    starts = [0, *ends[:-1]]
    if len(split) != stages or ends[-1] != layers or min(split) < 1:
        raise LayoutError(
            f"a layer split must give each of {stages} stages at least one of the {layers} layers,"
            f" got {tuple(split)}; change it to sum to {layers}"
        )
    for start in starts:
        if start not in cuts:
            raise LayoutError(
                f"pipeline stages of this model must start at one of the layers {tuple(cuts)}, got"
                f" {start}; change the layer split"
            )
    return [range(a, b) for a, b in zip(starts, ends, strict=True)]


def build_stage(
    config: ModelConfig,
    layers: range,
    groups: Groups,
    *,
    mixed_precision: MixedPrecision,
    recompute: Recompute,
    sharding: Sharding,
    ops: Ops | None,
    prepare: Callable[[StagedModel], object] | None = None,
    allocate: bool = True,
    casts_weights: bool = False,
) -> StagedModel:
    """Build one stage on this process's device. Weights are not initialized.

    It is built on the meta device, then split, prepared, wrapped for recomputation and sharded, in
    that order, so no process ever allocates more than its shard.

    Args:
        config: model configuration.
        layers: numbers of the blocks of this stage.
        groups: process groups of the layout.
        mixed_precision: compute dtype.
        recompute: activation checkpointing.
        sharding: sharding mode.
        ops: operators.
        prepare: called with the stage before it is sharded.
        allocate: allocate weights; otherwise they stay on the meta device.
        casts_weights: in one process, cast weights inside compiled blocks instead of with FSDP.
    """
    plan = model_plan(config)
    with torch.device("meta"):
        stage = build_model(
            config,
            ops=ops,
            layers=layers,
            first=layers.start == 0,
            last=layers.stop == config.num_hidden_layers,
        )
    split_model(stage, plan, groups)
    split_experts(stage, groups)
    if prepare is not None:
        prepare(stage)
    recompute_blocks(stage, plan, recompute)
    if casts_weights and isinstance(stage, Decoder):
        compute_in(stage, plan, getattr(torch, precision_name(mixed_precision)))
    else:
        shard_model(stage, plan, groups, mixed_precision=mixed_precision, sharding=sharding)
    if allocate:
        allocated: nn.Module = stage.to_empty(device=groups.device)
        assert allocated is stage
    return stage
