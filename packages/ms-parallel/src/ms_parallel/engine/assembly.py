"""Builds what an engine runs: configuration, plan and this process's stages."""

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
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.family import family_of
from ms_parallel.models.foreign.config import TransformersModel
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.registry import architecture, architectures, model_plan, parameter_shapes
from ms_parallel.models.staged import StagedModel
from ms_parallel.settings import a_path
from ms_parallel.split.data_axis import Sharding
from ms_parallel.split.memory.recompute_choice import Recompute
from ms_parallel.split.own_model import WHOLE, OwnModelConfig, build_own, check_own, check_stages
from ms_parallel.split.stages import build_stage, cut_layers
from ms_parallel.weights.initial import initialise
from ms_parallel.weights.load import has_weights, load_weights

GIB, STATE_BYTES = 1 << 30, 16
"""A weight, its gradient and its two moments, in float32."""

Given = str | Path | ModelConfig | TransformersModel | nn.Module
"""An architecture's name, a folder, a configuration, or a module of the user's own."""


@frozen
class EngineArguments(EngineOptions):
    """The arguments of an `Engine`: what may be given by place, and its options."""

    model: Given = field(validator=a_path(objects=True))
    layout: Layout | None = None


def describe(
    model: Given, plan: ModelPlan | None, layout: Layout, recompute: Recompute
) -> tuple[ModelConfig, ModelPlan]:
    """Read the configuration and the plan of what was given, checked against the layout.

    Raises:
        ConfigError: a plan is given for a model that has one.
        LayoutError: the layout does not fit the model.
        ModelError: the folder's model cannot be read.
    """
    if isinstance(model, nn.Module):
        plan = plan or WHOLE
        check_own(model, plan, layout, recompute)
        # It lacks the sizes that only our own models are cut by.
        config = OwnModelConfig.of(model, plan)
        plan = evolve(plan, cuts=tuple(range(config.num_hidden_layers)))
        return cast(ModelConfig, config), plan
    if plan is not None:
        raise ConfigError("plan is for a module of your own; leave it out, as this model has one")
    known = architecture(model) if isinstance(model, str | Path) else cast(ModelConfig, model)
    family_of(known).check_layout(known, layout)
    return known, model_plan(known)


def sharded_layout(layout: Layout, sharding: Sharding) -> Layout:
    """Return the layout with as many copies of the weights as the sharding asks for.

    Raises:
        LayoutError: both say something, and not the same.
    """
    if sharding != "replicate":
        return layout
    if layout.replicate not in (1, layout.token_ranks):
        raise LayoutError(
            f"sharding='replicate' shards nothing, but replicate={layout.replicate} shards weights"
            f" over {layout.shards} ranks; leave replicate out, or set sharding to zero3"
        )
    if layout.expert > 1:
        raise LayoutError(
            f"expert={layout.expert} shares out experts over ranks that shard weights, and"
            " sharding='replicate' has none; set sharding to zero1"
        )
    return evolve(layout, replicate=layout.token_ranks)


class Alike(Protocol):
    """Settings that ask for devices of one kind."""

    @property
    def reproducible(self) -> bool:
        """Whether weights are to be the same to the bit under other layouts."""


def check_devices(devices: object, layout: Layout, options: Alike) -> None:
    """Check that the devices of a run, where they are of several kinds, can train together.

    Args:
        devices: those of all ranks; anything else is one kind.
        layout: how the processes split the work.
        options: the run's or the engine's.

    Raises:
        ConfigError: a setting needs devices of one kind.
        LayoutError: the layout does, or has another number of ranks.
    """
    if not isinstance(devices, Devices):
        return
    devices.check_world(layout.world_size)
    if not devices.are_mixed:
        return
    check_mixed(layout)
    if options.reproducible:
        raise ConfigError(
            "reproducible=True cannot hold on devices of several kinds, whose products are rounded"
            " differently; leave reproducible out, or use one kind"
        )


def build_stages(
    model: Given,
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
        model: what was given.
        config: of the model.
        plan: of the model.
        placement: pipeline rank of each stage.
        split: layers of each stage; None for as even as can be.
        groups: the layout's processes.
        options: the engine's.
        compiled: whether the training of blocks will be compiled.
    """
    keep_freed_pages(groups.device)
    prepare = _preparation(options)
    how: Any = {
        "mixed_precision": options.mixed_precision,
        "recompute": options.recompute,
        "sharding": options.sharding,
    }
    layers = cut_layers(config.num_hidden_layers, len(placement), plan.cuts, split)
    if isinstance(model, nn.Module):
        if len(placement) > 1:
            check_stages(model, plan, layers)
        here = {n: layers[n] for n, home in enumerate(placement) if home == groups.place.pipeline}
        own = build_own(model, plan, here, groups, prepare=prepare, **how)
        return cast(dict[int, StagedModel], own)
    if groups.device.type == "cpu":
        _check_memory(config, groups.layout)
    ops = options.ops or operators
    how["casts_weights"] = (
        compiled
        and bool(options.mixed_precision)
        and options.prepare is None
        and groups.layout.world_size == 1
    )
    stages = {
        stage: build_stage(config, layers[stage], groups, ops=ops, prepare=prepare, **how)
        for stage, home in enumerate(placement)
        if home == groups.place.pipeline
    }
    if options.weights != "unset":
        folder = _weights_in(model) if options.weights == "initial" else Path(options.weights)
        for stage in stages.values():
            if folder is None:
                initialise(stage, options.seed)
            else:
                load_weights(stage, folder)
    return stages


def build_beside(
    config: ModelConfig,
    placement: Sequence[int],
    split: Sequence[int] | None,
    groups: Groups,
    options: EngineOptions,
) -> dict[int, StagedModel]:
    """Build this process's stages once more, in float32 and without storage."""
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
            prepare=_preparation(options),
            allocate=False,
        )
        for stage, home in enumerate(placement)
        if home == groups.place.pipeline
    }


def _preparation(options: EngineOptions) -> Callable[[Any], object]:
    """Compose what is done to a stage before it is sharded: `prepare`, then extra heads."""

    def prepare(stage: Any) -> None:
        if options.prepare is not None:
            options.prepare(stage)
        if options.heads:
            add_heads(stage, options.heads)

    return prepare


def _check_memory(config: ModelConfig, layout: Layout) -> None:
    """Refuse a model that this machine cannot hold, before it is taken to its knees.

    Counts weights, gradients and two moments in float32, each on one process alone: less than what
    is really needed, so that nothing is refused that fits.
    """
    here = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), layout.world_size)
    count = sum(shape.numel() for shape in parameter_shapes(config).values())
    needed = count * STATE_BYTES * here // layout.world_size
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ConfigError(
            f"a model of {count:,} parameters needs {needed / GIB:,.0f} GiB here in training, and"
            f" this machine has {there / GIB:,.0f} GiB; make it smaller, or use more machines"
        )


def _weights_in(model: Given) -> Path | None:
    """Find the folder to read weights from, if `model` is one that has any."""
    if isinstance(model, TransformersModel):
        return model.folder if model.folder and has_weights(model.folder) else None
    if not isinstance(model, str | Path) or str(model) in architectures():
        return None
    return Path(model) if has_weights(model) else None
