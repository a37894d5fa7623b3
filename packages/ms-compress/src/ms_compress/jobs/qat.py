"""`ms-compress qat`: train a model as its target will compute, and export it."""

from torch import nn

from ms_compress.commands.command import Outcome
from ms_compress.commands.options import QatRun
from ms_compress.errors import ConfigError
from ms_compress.jobs.dataset import check_tokenizers, training_rows
from ms_compress.jobs.finish import check_exportable, finish
from ms_compress.jobs.loading import check_finite, load
from ms_compress.jobs.methods import prepare, round_by_gptq
from ms_compress.jobs.output import run_output
from ms_compress.jobs.training import train
from ms_compress.methods.pruning import keep_zeros, mask_zeros, masks
from ms_compress.methods.qat import FloatThenQuantised
from ms_compress.models.logits import vocabulary_of

CALIBRATION = 256
"""Rows that GPTQ sees before training: it runs the whole model on them for each decoder layer."""


def run(options: QatRun) -> Outcome:
    """Prepare, train, export."""
    with run_output("qat", options) as place:
        if place.finished:
            return place.already()
        check_tokenizers(options)
        model = load(options.model)
        check_exportable(model, options)
        teacher = _teacher(model, options)
        if options.sparse:
            _keep_zeros(model, options)
        text = training_rows(options, model)
        _prepare(model, options, calibrated=place.steps_made() is not None)
        schedule = FloatThenQuantised(float_steps=options.float_steps)
        losses = train(
            model,
            text,
            options,
            place,
            teacher=teacher,
            before_step=lambda step: schedule.apply(model, step),
            after_step=lambda step: keep_zeros(model) if masks(model) else None,
        )
        check_finite(model, failed=True)
        schedule.apply(model, options.float_steps)
        return finish(model, options, place, losses)


def _teacher(model: nn.Module, options: QatRun) -> nn.Module | None:
    if options.teacher is None:
        return None
    teacher = load(options.teacher)
    sizes = [vocabulary_of(each) for each in (model, teacher)]
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
            f"sparse=true needs weights that are zero, and {options.model} has none; prune it"
            " first, or remove sparse"
        )


def _prepare(model: nn.Module, options: QatRun, *, calibrated: bool) -> None:
    """Make the model's layers compute as the target will; a saved training holds GPTQ's codes."""
    if options.start == "gptq" and not calibrated:
        round_by_gptq(model, options, most=CALIBRATION, by_loss=True, for_training=True)
    else:
        prepare(model, options, learned_scales=options.learned_scales)
