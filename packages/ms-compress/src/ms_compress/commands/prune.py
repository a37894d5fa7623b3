"""`ms-compress prune`: prune a model by magnitude or Wanda, train on, and save it."""

from typing import Any

import torch
from attrs import field, frozen
from torch import nn

from ms_compress.commands.command import Command
from ms_compress.commands.finish import calibration_of, text_of
from ms_compress.commands.loading import load, save
from ms_compress.commands.progress import Shown
from ms_compress.commands.run_options import ModelRun
from ms_compress.commands.training import output, train, trained
from ms_compress.pattern import Pattern, pattern
from ms_compress.pruning import GradualPruning, keep_zeros, prune, sparsity
from ms_compress.run_file import build
from ms_compress.settings import flag, one_of
from ms_compress.wanda_pruning import wanda

__all__ = ["PRUNE"]


@frozen(kw_only=True)
class PruneRun(ModelRun):
    """Settings of the command."""

    pattern: Pattern = field(converter=pattern)
    """`"2:4"`, or a share such as 0.5."""
    method: str = field(default="magnitude", validator=one_of("magnitude", "wanda", "gradual"))
    """At once by magnitude or Wanda, or gradually over the first half of the training."""
    retrain: bool = field(default=True, validator=flag)


def run(settings: dict[str, Any], where: str) -> int:
    """Prune, train on, save; prints the folder."""
    options = build(PruneRun, settings, where=where)
    with output(options):
        model = load(options.model)
        trains = options.retrain or options.method == "gradual"
        text = text_of(options, model) if trains else None
        schedule = _prune(model, options)
        if text is not None:
            train(
                model,
                text,
                options,
                before_step=None if schedule is None else lambda step: schedule.apply(model, step),
                after_step=lambda step: keep_zeros(model),
            )
        keep_zeros(model)
        save(model, options.output_dir, beside=options.model)
        trained(options)
    print(f"{options.output_dir}: {sparsity(model):.1%} of the pruned layers' weights are zero")
    return 0


def _prune(model: nn.Module, options: PruneRun) -> GradualPruning | None:
    """At once, or by the schedule that is returned."""
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


PRUNE = Command(
    name="prune",
    help="prune a model by magnitude or Wanda, train on, and save it",
    example="ms-compress prune RUN.toml --set pattern=2:4 --set method=wanda",
    run=run,
)
