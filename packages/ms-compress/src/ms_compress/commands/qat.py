"""`ms-compress qat`: train a model with its target's quantization, and export it."""

from pathlib import Path

from torch import nn

from ms_compress.errors import ConfigError
from ms_compress.methods.gptq import gptq
from ms_compress.methods.pruning import keep_zeros, mask_zeros, masks
from ms_compress.methods.qat import FloatThenQuantized, qat
from ms_compress.models.experts import separate_experts
from ms_compress.models.logits import vocabulary_of
from ms_compress.options import QatRun
from ms_compress.run.dataset import calibration_batches, check_tokenizers, training_rows
from ms_compress.run.export import check_exportable, export_run
from ms_compress.run.model import check_finite, load
from ms_compress.run.outcome import Outcome
from ms_compress.run.output import run_output
from ms_compress.run.progress import ProgressDisplay
from ms_compress.run.training import train

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
        teacher = None if options.teacher is None else _load_teacher(options.teacher, model)
        if options.sparse:
            _keep_zeros(model, options)
        rows = training_rows(options, model)
        if options.start == "gptq" and output.saved_steps() is None:
            batches = calibration_batches(options, model, limit=CALIBRATION_ROWS)
            with ProgressDisplay("layer") as display:
                gptq(
                    model,
                    options.scheme,
                    batches,
                    ignore=options.ignore,
                    activations=options.activations,
                    by_loss=True,
                    for_training=True,
                    progress=display.update,
                )
        else:  # the weights of a resumed run already have GPTQ's codes
            qat(
                model,
                options.scheme,
                ignore=options.ignore,
                embeddings=options.embeddings,
                head=options.head,
                activations=options.activations,
                learned_scales=options.learned_scales,
            )
        schedule = FloatThenQuantized(float_steps=options.float_steps)
        losses = train(
            model,
            rows,
            options,
            output,
            teacher=teacher,
            before_step=lambda step: schedule.apply(model, step),
            after_step=lambda step: keep_zeros(model) if masks(model) else None,
        )
        check_finite(model, failed=True)
        # Also if this process trained no step, as after resuming a finished training.
        schedule.apply(model, options.float_steps)
        return export_run(model, options, output, losses)


def _load_teacher(folder: Path, model: nn.Module) -> nn.Module:
    teacher = load(folder)
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
