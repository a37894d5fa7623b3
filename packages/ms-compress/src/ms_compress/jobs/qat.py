"""`ms-compress qat`: train a model with its target's quantization, and export it."""

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
from ms_compress.methods.qat import FloatThenQuantized
from ms_compress.models.experts import separate_experts
from ms_compress.models.logits import vocabulary_of

CALIBRATION_ROWS = 256
"""Rows for GPTQ before training, which runs the whole model on them for each decoder layer."""


def run(options: QatRun) -> Outcome:
    """Prepare, train and export."""
    with run_output("qat", options) as output:
        if output.finished:
            return output.already_finished()
        check_tokenizers(options)
        model = separate_experts(load(options.model))
        check_exportable(model, options)  # before the training, not after it
        teacher = _teacher(model, options)
        if options.sparse:
            _keep_zeros(model, options)
        text = training_rows(options, model)
        _prepare(model, options, calibrated=output.steps_made() is not None)
        schedule = FloatThenQuantized(float_steps=options.float_steps)
        losses = train(
            model,
            text,
            options,
            output,
            teacher=teacher,
            before_step=lambda step: schedule.apply(model, step),
            after_step=lambda step: keep_zeros(model) if masks(model) else None,
        )
        check_finite(model, failed=True)
        # Also if this process trained no step, as after resuming a finished training.
        schedule.apply(model, options.float_steps)
        return finish(model, options, output, losses)


def _teacher(model: nn.Module, options: QatRun) -> nn.Module | None:
    if options.teacher is None:
        return None
    teacher = load(options.teacher)
    sizes = [vocabulary_of(network) for network in (model, teacher)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"teacher must have the model's vocabulary of {sizes[0]}, got {sizes[1]}; use a teacher"
            " with the same tokenizer"
        )
    return teacher


def _keep_zeros(model: nn.Module, options: QatRun) -> None:
    mask_zeros(model, options.ignore)
    if not masks(model):
        raise ConfigError(
            f"sparse=true needs weights that are zero, but {options.model} has none; prune it"
            " first, or remove sparse"
        )


def _prepare(model: nn.Module, options: QatRun, *, calibrated: bool) -> None:
    """Prepare the model's layers, with GPTQ codes unless a saved training already has them."""
    if options.start == "gptq" and not calibrated:
        round_by_gptq(model, options, limit=CALIBRATION_ROWS, by_loss=True, for_training=True)
    else:
        prepare(model, options, learned_scales=options.learned_scales)
