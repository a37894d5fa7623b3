"""`ms-compress prune`: prune a model by magnitude or Wanda, retrain it, and save it."""

import torch
from torch import nn

from ms_compress.commands.command import Outcome
from ms_compress.commands.options import PruneRun
from ms_compress.jobs.dataset import calibration_rows, check_tokenizers, training_rows
from ms_compress.jobs.loading import load, save
from ms_compress.jobs.methods import calibrate
from ms_compress.jobs.output import run_output
from ms_compress.jobs.progress import ProgressDisplay
from ms_compress.jobs.training import outcome_of, train
from ms_compress.methods.pruning import GradualPruning, keep_zeros, prune, sparsity
from ms_compress.methods.reap import expert_count, reap_scores, remove_experts
from ms_compress.methods.wanda import wanda


def run(options: PruneRun) -> Outcome:
    """Prune, retrain and save."""
    with run_output("prune", options) as output:
        if output.finished:
            return output.already_finished()
        check_tokenizers(options)
        model = load(options.model)
        trains = options.retrain or options.method == "gradual"
        text = training_rows(options, model) if trains else None
        if options.method == "reap":
            model = _remove_experts(model, options)
        schedule = _prune(model, options)
        losses: list[float] = []
        if text is not None:
            losses = train(
                model,
                text,
                options,
                output,
                before_step=None if schedule is None else lambda step: schedule.apply(model, step),
                after_step=lambda step: keep_zeros(model),
            )
        keep_zeros(model)
        save(model, options.output_dir, source=options.model, before_publish=output.seal)
        output.end()
    if options.method == "reap":
        count = expert_count(model)
        result = f"{count} experts are left in each layer"
        return outcome_of(options.output_dir, result, losses, experts=count)
    share = sparsity(model)
    result = f"{share:.1%} of the pruned layers' weights are zero"
    return outcome_of(options.output_dir, result, losses, sparsity=share)


def _remove_experts(model: nn.Module, options: PruneRun) -> nn.Module:
    rows = calibration_rows(options, model)
    with ProgressDisplay("batch") as display:
        batches = torch.split(rows, options.tuning.batch_size)
        scores = reap_scores(model, batches, progress=display.update)
    return remove_experts(model, scores, options.pattern.sparsity)


def _prune(model: nn.Module, options: PruneRun) -> GradualPruning | None:
    """Prune in one shot, or return the schedule by which training prunes."""
    if options.method == "gradual":
        half = max(1, options.tuning.steps // 2)
        return GradualPruning(pattern=options.pattern, end=half, ignore=options.ignore)
    if options.method == "reap":
        return None
    if options.method == "magnitude":
        prune(model, options.pattern, ignore=options.ignore)
        return None
    calibrate(wanda, model, options.pattern, options)
    return None
