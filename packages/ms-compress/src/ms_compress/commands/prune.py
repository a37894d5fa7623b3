"""`ms-compress prune`: prune a model's weights or experts, retrain it, and save it."""

from ms_compress.methods.pruning import GradualPruning, keep_zeros, prune, sparsity
from ms_compress.methods.reap import expert_count, reap_scores, remove_experts
from ms_compress.methods.wanda import wanda
from ms_compress.models.experts import fuse_experts, separate_experts
from ms_compress.options import PruneRun
from ms_compress.run.dataset import calibration_batches, check_tokenizers, training_rows
from ms_compress.run.model import load, save
from ms_compress.run.outcome import Outcome
from ms_compress.run.output import run_output
from ms_compress.run.progress import ProgressDisplay
from ms_compress.run.training import train


def run(options: PruneRun) -> Outcome:
    """Prune, retrain and save."""
    method, pattern, ignore = options.method, options.pattern, options.ignore
    with run_output("prune", options) as output:
        if output.finished:
            return output.already_finished()
        check_tokenizers(options)
        model = load(options.model)
        if method != "reap":  # masks are of linear layers
            separate_experts(model)
        trains = options.retrain or method == "gradual"
        rows = training_rows(options, model) if trains else None
        schedule = None
        if method == "reap":
            batches = calibration_batches(options, model)
            with ProgressDisplay("batch") as display:
                scores = reap_scores(model, batches, progress=display.update)
            model = remove_experts(model, scores, pattern.sparsity)
        elif method == "wanda":
            batches = calibration_batches(options, model)
            with ProgressDisplay("layer") as display:
                wanda(model, pattern, batches, ignore=ignore, progress=display.update)
        elif method == "magnitude":
            prune(model, pattern, ignore=ignore)
        else:
            half = max(1, options.tuning.steps // 2)
            schedule = GradualPruning(pattern=pattern, end=half, ignore=ignore)
        losses: list[float] = []
        if rows is not None:
            losses = train(
                model,
                rows,
                options,
                output,
                before_step=None if schedule is None else lambda step: schedule.apply(model, step),
                after_step=lambda step: keep_zeros(model),
            )
        keep_zeros(model)
        share = sparsity(model)
        fuse_experts(model)  # folders have the names of the original's
        save(model, options.output_dir, source=options.model, before_publish=output.seal)
        output.end()
    if method == "reap":
        count = expert_count(model)
        result = f"{count} experts are left in each layer"
        return Outcome.of_folder(options.output_dir, result, losses, experts=count)
    result = f"{share:.1%} of the pruned layers' weights are zero"
    return Outcome.of_folder(options.output_dir, result, losses, sparsity=share)
