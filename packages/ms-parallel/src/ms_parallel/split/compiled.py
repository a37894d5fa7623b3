"""Compiles the forward and backward of each block by itself, with torch.compile.

A block is compiled once for all layers that are alike, and what surrounds it, such as the gathering
of weights and recomputation, runs as it did.
"""

from typing import Any, Protocol

import torch
from torch import nn

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.plan import ModelPlan
from ms_parallel.schedules.table.action import Kind
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.split.memory.recompute_choice import Recompute


class CompileOptions(Protocol):
    """What is asked of an engine's options."""

    @property
    def recompute(self) -> Recompute:
        """What blocks run again."""

    @property
    def reproducible(self) -> bool:
        """Whether bits are the same under every layout."""


def check_compiled(config: Any, layout: Layout, chosen: CompileOptions, schedule: Schedule) -> None:
    """Check that blocks may be compiled.

    Args:
        config: of the model.
        layout: how it is split.
        chosen: the engine's options.
        schedule: any of the run.

    Raises:
        ConfigError: they may not, with the reason.
    """
    recompute = chosen.recompute
    for axis in ("tensor", "context", "expert"):
        if getattr(layout, axis) > 1:
            raise ConfigError(
                f"compile=True cannot be combined with {axis}={getattr(layout, axis)}: compiled"
                f" blocks cannot contain collectives; set {axis} to 1, or compile to False"
            )
    if not isinstance(config, DecoderConfig) or config.mixture is not None:
        raise ConfigError(
            "compile=True supports only the dense decoders of ms-parallel, whose blocks have no"
            " data-dependent branches; set compile to False"
        )
    if chosen.reproducible:
        raise ConfigError(
            "compile=True cannot be combined with reproducible=True: compiled blocks may sum in"
            " another order; set one of them to False"
        )
    if recompute not in ("none", "full"):
        raise ConfigError(
            f"compile=True cannot be combined with recompute={recompute!r}, which selects single"
            " operators; set recompute to none or full, or compile to False"
        )
    if any(a.kind is Kind.BACKWARD_INPUT for row in schedule.computations() for a in row):
        raise ConfigError(
            f"compile=True cannot be combined with schedule={schedule.name!r}, which splits the"
            " backward pass; use schedule 1f1b, gpipe or interleaved-1f1b, or set compile to False"
        )


def compile_blocks(stage: nn.Module, plan: ModelPlan) -> None:
    """Compile each block of a stage, in place; forwards without gradients run as they did."""
    for name, block in stage.named_modules():
        if plan.is_block(name):
            block.forward = _training_alone(block.forward, torch.compile(block.forward))


def _training_alone(eager: Any, compiled: Any) -> Any:
    """Return a forward that is compiled where there are gradients; without, text lengths vary."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else eager)(*args, **kwargs)

    return forward
