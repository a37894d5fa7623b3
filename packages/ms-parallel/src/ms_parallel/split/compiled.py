"""Compiles the forward and backward pass of each block with torch.compile.

Equal blocks are compiled once. The code around them, such as gathering weights and recomputation,
is not compiled.
"""

from typing import Any, Protocol

import torch
from torch import nn

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError
from ms_parallel.memory.modes import Recompute
from ms_parallel.models.decoder import Decoder
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.plan import ModelPlan
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.split.precision_choice import Float8
from ms_parallel.torch_private import has_triton


class CompileOptions(Protocol):
    """The engine's options that decide whether blocks may be compiled."""

    @property
    def recompute(self) -> Recompute:
        """Activation checkpointing of blocks."""

    @property
    def reproducible(self) -> bool:
        """Whether weights are bitwise the same under every layout."""

    @property
    def float8(self) -> Float8:
        """Recipe of float8 products."""


def check_compiled(
    config: Any, layout: Layout, options: CompileOptions, schedule: Schedule
) -> None:
    """Check that blocks may be compiled.

    Args:
        config: model configuration.
        layout: parallel layout.
        options: the engine's options.
        schedule: any schedule of the run.

    Raises:
        ConfigError: they may not, with the reason.
    """
    problem = compile_problem(config, layout, options, schedule)
    if problem is not None:
        raise ConfigError(f"compile=True {problem}")


def compiles_by_default(
    config: Any, layout: Layout, options: CompileOptions, schedule: Schedule, device: torch.device
) -> bool:
    """Whether `compile="auto"` compiles: on a GPU with Triton, where nothing forbids it."""
    return (
        device.type == "cuda"
        and compile_problem(config, layout, options, schedule) is None
        and has_triton()
    )


def compile_problem(
    config: Any, layout: Layout, options: CompileOptions, schedule: Schedule
) -> str | None:
    """Return why blocks may not be compiled, with the remedy, or None."""
    recompute = options.recompute
    for axis in ("tensor", "context", "expert"):
        if getattr(layout, axis) > 1:
            return (
                f"cannot be combined with {axis}={getattr(layout, axis)}: compiled blocks cannot"
                f" contain collectives; set {axis} to 1, or compile to False"
            )
    if not isinstance(config, DecoderConfig) or config.mixture is not None:
        return (
            "supports only the dense decoders of ms-parallel, whose blocks have no data-dependent"
            " branches; set compile to False"
        )
    if options.reproducible:
        return (
            "cannot be combined with reproducible=True: compiled blocks may sum in another order;"
            " set compile or reproducible to False"
        )
    if recompute not in ("none", "full"):
        return (
            f"cannot be combined with recompute={recompute!r}, which selects single operators; set"
            " recompute to none or full, or compile to False"
        )
    if options.float8 not in ("none", "rowwise"):
        return (
            f"cannot be combined with float8={options.float8!r}, which is emulated; set float8 to"
            " rowwise, or compile to False"
        )
    # Deferring weight gradients intercepts linear layers, which a compiled block hides.
    if schedule.splits_backward:
        return (
            f"cannot be combined with schedule={schedule.name!r}, which splits the backward pass;"
            " use schedule 1f1b, gpipe or interleaved-1f1b, or set compile to False"
        )
    return None


def compile_blocks(stage: nn.Module, plan: ModelPlan, *, flex_attention: bool) -> None:
    """Compile the training forward and backward of each block of a stage, in place.

    Args:
        stage: a stage of the model.
        plan: the model's plan, which names the blocks.
        flex_attention: attend to packed documents by FlexAttention, on a GPU.
    """
    if flex_attention and isinstance(stage, Decoder):
        stage.flex_attention = True
    for name, block in stage.named_modules():
        if plan.is_block(name):
            block.forward = _compiled_in_training(block.forward, torch.compile(block.forward))


def _compiled_in_training(eager: Any, compiled: Any) -> Any:
    """Run `compiled` with gradients and `eager` without, where text lengths vary."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else eager)(*args, **kwargs)

    return forward
