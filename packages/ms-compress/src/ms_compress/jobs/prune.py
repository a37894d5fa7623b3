"""`ms-compress prune`: prune a model by magnitude or Wanda, train on, and save it."""

import torch
from torch import nn

from ms_compress.commands.command import Outcome
from ms_compress.commands.options import PruneRun
from ms_compress.jobs.finish import calibration_of, text_of, training_of
from ms_compress.jobs.loading import load, save
from ms_compress.jobs.output import run_output
from ms_compress.jobs.progress import Shown
from ms_compress.jobs.training import train
from ms_compress.methods.pruning import GradualPruning, keep_zeros, prune, sparsity
from ms_compress.methods.wanda import wanda

__all__ = ["run"]


def run(options: PruneRun) -> Outcome:
    """Prune, train on, save."""
    with run_output("prune", options) as place:
        if place.finished:
            return place.already()
        model = load(options.model)
        trains = options.retrain or options.method == "gradual"
        text = text_of(options, model) if trains else None
        schedule = _prune(model, options)
        losses: list[float] = []
        if text is not None:
            losses = train(
                model,
                text,
                options,
                place,
                before_step=None if schedule is None else lambda step: schedule.apply(model, step),
                after_step=lambda step: keep_zeros(model),
            )
        keep_zeros(model)
        save(model, options.output_dir, beside=options.model, last=place.seal)
        place.end()
    told, facts = training_of(losses)
    share = f"{sparsity(model):.1%} of the pruned layers' weights are zero"
    return Outcome(
        lines=(*told, f"{options.output_dir}: {share}"),
        facts={"folder": str(options.output_dir), "sparsity": sparsity(model), **facts},
    )


def _prune(model: nn.Module, options: PruneRun) -> GradualPruning | None:
    """Prune at once, or return the schedule by which the training prunes."""
    if options.method == "gradual":
        half = max(1, options.tuning.steps // 2)
        return GradualPruning(how=options.pattern, end=half, exceptions=options.exceptions)
    if options.method == "magnitude":
        prune(model, options.pattern, exceptions=options.exceptions)
        return None
    batches = torch.split(calibration_of(options, model), options.tuning.batch_size)
    with Shown("layer") as shown:
        wanda(
            model,
            options.pattern,
            batches,
            exceptions=options.exceptions,
            progress=shown.made,
        )
    return None
