"""`ms-compress qat`: train a model as its target will compute, and export it."""

from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import nn

from ms_compress.commands.command import Command
from ms_compress.commands.finish import calibration_of, check, finish, text_of
from ms_compress.commands.loading import check_finite, load
from ms_compress.commands.progress import Shown
from ms_compress.commands.run_options import SchemeRun, optional_path
from ms_compress.commands.training import output, steps_made, train, trained
from ms_compress.errors import ConfigError
from ms_compress.gptq_rounding import gptq
from ms_compress.preparation import FloatThenQuantised, qat
from ms_compress.pruning import keep_zeros, mask_zeros, masks
from ms_compress.run_file import build
from ms_compress.settings import flag, one_of, whole

__all__ = ["QAT"]

CALIBRATION = 256
"""Rows that GPTQ sees before training: it runs the whole model on them for each decoder layer."""


@frozen(kw_only=True)
class QatRun(SchemeRun):
    """Settings of the command."""

    learned_scales: bool = field(default=True, validator=flag)
    start: str = field(default="nearest", validator=one_of("nearest", "gptq"))
    """From the nearest codes, or from those of GPTQ by the loss, on the dataset's first rows."""
    float_steps: int = field(default=0, validator=whole(least=0))
    """Steps before anything is rounded."""
    sparse: bool = field(default=False, validator=flag)
    """Keep the model's zeros as a mask."""
    teacher: Path | None = field(default=None, converter=optional_path)
    """A model folder whose logits are distilled."""

    def __attrs_post_init__(self) -> None:
        plain = self.learned_scales and not (self.embeddings or self.head)
        if self.start == "gptq" and not plain:
            raise ConfigError(
                "start=gptq rounds decoder layers alone and learns their scales; leave embeddings"
                " and head false and learned_scales true"
            )
        if self.float_steps >= self.tuning.steps:
            raise ConfigError(
                f"float_steps is {self.float_steps} of tuning.steps={self.tuning.steps}, so no step"
                " would meet what is rounded; give fewer"
            )


def run(settings: dict[str, Any], where: str) -> int:
    """Prepare, train, export; prints the folder."""
    options = build(QatRun, settings, where=where)
    with output(options):
        model = load(options.model)
        check(model, options)
        teacher = _teacher(model, options)
        if options.sparse:
            _keep_zeros(model, options)
        text = text_of(options, model)
        _prepare(model, options)
        schedule = FloatThenQuantised(float_steps=options.float_steps)
        train(
            model,
            text,
            options,
            teacher=teacher,
            before_step=lambda step: schedule.apply(model, step),
            after_step=lambda step: keep_zeros(model) if masks(model) else None,
        )
        check_finite(model, failed=True)
        schedule.apply(model, options.float_steps)
        code = finish(model, options)
        trained(options)
    return code


def _teacher(model: nn.Module, options: QatRun) -> nn.Module | None:
    if options.teacher is None:
        return None
    teacher = load(options.teacher)
    sizes = [int(each.config.vocab_size) for each in (model, teacher)]  # type: ignore[union-attr,arg-type]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"teacher has a vocabulary of {sizes[1]}, and the model one of {sizes[0]}; give a"
            " teacher that reads the same tokens"
        )
    return teacher


def _keep_zeros(model: nn.Module, options: QatRun) -> None:
    mask_zeros(model, options.exceptions)
    if not masks(model):
        raise ConfigError(
            f"sparse is true, and no weight of {options.model} is zero; prune it first, or leave"
            " sparse out"
        )


def _prepare(model: nn.Module, options: QatRun) -> None:
    """Make the model's layers compute as the target will; what was trained holds GPTQ's codes."""
    if options.start == "gptq" and steps_made(options) is None:
        batches = torch.split(
            calibration_of(options, model, most=CALIBRATION), options.tuning.batch_size
        )
        with Shown("layer") as shown:
            gptq(
                model,
                options.scheme,
                batches,
                exceptions=options.exceptions,
                activations=options.activations,
                by_loss=True,
                for_training=True,
                progress=shown.made,
            )
        return
    qat(
        model,
        options.scheme,
        exceptions=options.exceptions,
        embeddings=options.embeddings,
        head=options.head,
        activations=options.activations,
        learned_scales=options.learned_scales,
    )


QAT = Command(
    name="qat",
    help="train a model as its target will compute, and export it",
    example="ms-compress qat RUN.toml --set scheme=gguf.q4_0 --set tuning.steps=200",
    run=run,
    flags=("verify",),
)
