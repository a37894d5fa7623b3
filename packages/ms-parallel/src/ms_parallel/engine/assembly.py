"""Builds the parts of an engine: configuration, plan and this process's stages."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from attrs import evolve, field, frozen
from torch import nn

from ms_parallel import operators
from ms_parallel.cluster.device import keep_freed_pages
from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.mixed.devices import Devices
from ms_parallel.cluster.mixed.kinds import check_mixed
from ms_parallel.engine.heads import add_heads
from ms_parallel.engine.options import EngineOptions
from ms_parallel.errors import ConfigError, LayoutError
from ms_parallel.memory.modes import Recompute, Sharding
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.family import family_of
from ms_parallel.models.huggingface.config import TransformersModel
from ms_parallel.models.huggingface.multimodal import MultimodalModel
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.registry import architecture, architectures, model_plan, parameter_shapes
from ms_parallel.models.staged import StagedModel
from ms_parallel.settings import valid_path
from ms_parallel.split.float8 import use_float8
from ms_parallel.split.own_model import (
    UNSPLIT_PLAN,
    OwnModelConfig,
    build_own,
    check_own,
    check_stages,
)
from ms_parallel.split.stages import build_stage, cut_layers
from ms_parallel.weights.initial import initialize
from ms_parallel.weights.load import has_weights, load_weights

GIB, STATE_BYTES = 1 << 30, 16
"""Training bytes per parameter: weight, gradient and two moments, in float32."""

ModelSource = str | Path | ModelConfig | TransformersModel | nn.Module
"""Architecture name, model folder, configuration, or user-defined module."""


@frozen
class EngineArguments(EngineOptions):
    """Arguments of an `Engine`: the positional ones and its options."""

    model: ModelSource = field(validator=valid_path(objects=True))
    layout: Layout | None = None


def resolve_model(
    model: ModelSource, plan: ModelPlan | None, layout: Layout, recompute: Recompute
) -> tuple[ModelConfig, ModelPlan]:
    """Return the configuration and plan of a model, checked against the layout.

    Raises:
        ConfigError: `plan` was passed for a model that already has one.
        LayoutError: the layout does not fit the model.
        ModelError: the folder's model cannot be read.
    """
    if isinstance(model, nn.Module):
        plan = plan or (model.plan if isinstance(model, MultimodalModel) else UNSPLIT_PLAN)
        check_own(model, plan, layout, recompute)
        # OwnModelConfig lacks sizes such as head counts; only our own models are split by those.
        config = OwnModelConfig.of(model, plan)
        # A pipeline stage may start at any block of a user's module.
        plan = evolve(plan, cuts=tuple(range(config.num_hidden_layers)))
        return cast(ModelConfig, config), plan
    if plan is not None:
        raise ConfigError("plan is only for a module of your own; remove it, as this model has one")
    model_config = (
        architecture(model) if isinstance(model, str | Path) else cast(ModelConfig, model)
    )
    family_of(model_config).check_layout(model_config, layout)
    return model_config, model_plan(model_config)


def load_multimodal(folder: str | Path, options: EngineOptions) -> MultimodalModel:
    """Load the multimodal model of a folder, with the weights that the options ask for.

    Raises:
        ModelError: the folder cannot be read.
    """
    if options.weights in ("initial", "unset"):
        weights = options.weights == "initial" and has_weights(folder)
        return MultimodalModel.load(folder, weights=weights, seed=options.seed)
    return MultimodalModel.load(options.weights)


def sharded_layout(layout: Layout, sharding: Sharding) -> Layout:
    """Return the layout with the number of weight replicas that `sharding` implies.

    Raises:
        LayoutError: the layout contradicts `sharding`.
    """
    if sharding != "replicate":
        return layout
    if layout.replicate not in (1, layout.token_ranks):
        raise LayoutError(
            f"sharding='replicate' shards nothing, but replicate={layout.replicate} shards weights"
            f" over {layout.shards} ranks; remove replicate, or set sharding='zero3'"
        )
    if layout.expert > 1:
        raise LayoutError(
            f"expert={layout.expert} distributes experts over ranks that shard weights, but"
            " sharding='replicate' shards nothing; set sharding='zero1'"
        )
    return evolve(layout, replicate=layout.token_ranks)


class RequiresReproducible(Protocol):
    """Options that may require all devices to be of one kind."""

    @property
    def reproducible(self) -> bool:
        """Whether weights must be bitwise identical under every layout."""


def check_devices(devices: object, layout: Layout, options: RequiresReproducible) -> None:
    """Check that a run's devices can train together if they are of different kinds.

    Args:
        devices: devices of all ranks; anything but `Devices` means a single kind.
        layout: how the processes split the work.
        options: options of the run or the engine.

    Raises:
        ConfigError: a setting needs devices of one kind.
        LayoutError: the layout needs devices of one kind, or has a different number of ranks.
    """
    if not isinstance(devices, Devices):
        return
    devices.check_world(layout.world_size)
    if not devices.are_mixed:
        return
    check_mixed(layout)
    if options.reproducible:
        raise ConfigError(
            "reproducible=True needs devices of one kind, since different kinds round products"
            " differently; remove reproducible, or use one kind"
        )


def build_stages(
    model: ModelSource,
    config: ModelConfig,
    plan: ModelPlan,
    placement: Sequence[int],
    split: Sequence[int] | None,
    groups: Groups,
    options: EngineOptions,
    *,
    compiled: bool,
) -> dict[int, StagedModel]:
    """Build this process's stages by number, split and sharded, with their weights.

    Args:
        model: the model as passed to the engine.
        config: model configuration.
        plan: model plan.
        placement: pipeline rank of each stage.
        split: number of layers of each stage; None for an even split.
        groups: process groups of the layout.
        options: the engine's options.
        compiled: whether training of the blocks will be compiled.
    """
    keep_freed_pages(groups.device)
    prepare = _preparation(options, plan, groups)
    stage_options: Any = {
        "mixed_precision": options.mixed_precision,
        "recompute": options.recompute,
        "sharding": options.sharding,
    }
    layers = cut_layers(config.num_hidden_layers, len(placement), plan.cuts, split)
    if isinstance(model, nn.Module):
        if len(placement) > 1:
            check_stages(model, plan, layers)
        local_layers = {
            n: layers[n]
            for n, pipeline_rank in enumerate(placement)
            if pipeline_rank == groups.place.pipeline
        }
        local_stages = build_own(
            model, plan, local_layers, groups, prepare=prepare, **stage_options
        )
        return cast(dict[int, StagedModel], local_stages)
    if groups.device.type == "cpu":
        _check_memory(config, groups.layout)
    ops = options.ops or operators
    # In one compiled process, blocks cast their weights inside the compiled code; otherwise FSDP
    # casts them.
    stage_options["casts_weights"] = (
        compiled
        and bool(options.mixed_precision)
        and options.prepare is None
        and groups.layout.world_size == 1
    )
    stages = {
        stage: build_stage(config, layers[stage], groups, ops=ops, prepare=prepare, **stage_options)
        for stage, pipeline_rank in enumerate(placement)
        if pipeline_rank == groups.place.pipeline
    }
    # Unset weights are filled from a checkpoint later.
    if options.weights != "unset":
        folder = _weights_in(model) if options.weights == "initial" else Path(options.weights)
        for stage in stages.values():
            if folder is None:
                initialize(stage, options.seed)
            else:
                load_weights(stage, folder)
    return stages


def build_float32_stages(
    config: ModelConfig,
    placement: Sequence[int],
    split: Sequence[int] | None,
    groups: Groups,
    options: EngineOptions,
) -> dict[int, StagedModel]:
    """Build this process's stages a second time, in float32 on the meta device, for audits."""
    layers = cut_layers(config.num_hidden_layers, len(placement), model_plan(config).cuts, split)
    return {
        stage: build_stage(
            config,
            layers[stage],
            groups,
            mixed_precision=False,
            recompute=options.recompute,
            sharding=options.sharding,
            ops=options.ops or operators,
            prepare=_preparation(evolve(options, float8="none"), model_plan(config), groups),
            allocate=False,
        )
        for stage, pipeline_rank in enumerate(placement)
        if pipeline_rank == groups.place.pipeline
    }


def _preparation(
    options: EngineOptions, plan: ModelPlan, groups: Groups
) -> Callable[[Any], object]:
    """Return the function applied to a stage before sharding: `prepare`, float8, extra heads."""

    def prepare(stage: Any) -> None:
        if options.prepare is not None:
            options.prepare(stage)
        use_float8(stage, plan, options.float8, groups.device)
        if options.heads:
            add_heads(stage, options.heads)

    return prepare


def _check_memory(config: ModelConfig, layout: Layout) -> None:
    """Reject a model whose training state does not fit in this machine's memory.

    Counts weights, gradients and two moments in float32 for all local processes, a lower bound of
    the actual memory, so a model that fits is never rejected.
    """
    # The state is divided over all ranks, and this machine stores the parts of its local ranks.
    local_ranks = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), layout.world_size)
    count = sum(shape.numel() for shape in parameter_shapes(config).values())
    needed = count * STATE_BYTES * local_ranks // layout.world_size
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise ConfigError(
            f"a model of {count:,} parameters needs {needed / GIB:,.0f} GiB here in training, but"
            f" this machine has {memory / GIB:,.0f} GiB; use a smaller model or more machines"
        )


def _weights_in(model: ModelSource) -> Path | None:
    """Return the folder to read weights from; None if the model comes without weights."""
    if isinstance(model, TransformersModel):
        return model.folder if model.folder and has_weights(model.folder) else None
    if not isinstance(model, str | Path) or str(model) in architectures():
        return None
    return Path(model) if has_weights(model) else None
