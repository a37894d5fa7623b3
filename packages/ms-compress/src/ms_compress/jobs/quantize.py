"""`ms-compress quantize`: round a trained model without training, and export it."""

import torch
from torch import nn

from ms_compress.commands.command import Outcome
from ms_compress.commands.options import QuantizeRun
from ms_compress.jobs.finish import calibration_of, check, finish
from ms_compress.jobs.loading import load
from ms_compress.jobs.output import run_output
from ms_compress.jobs.progress import Shown
from ms_compress.methods.gptq import gptq
from ms_compress.methods.qat import fit_scales, qat

__all__ = ["run"]


def run(options: QuantizeRun) -> Outcome:
    """Round and export."""
    with run_output("quantize", options) as place:
        if place.finished:
            return place.already()
        model = load(options.model)
        check(model, options)
        _round(model, options)
        return finish(model, options, place)


def _round(model: nn.Module, options: QuantizeRun) -> None:
    if options.method == "gptq":
        batches = torch.split(calibration_of(options, model), options.tuning.batch_size)
        with Shown("layer") as shown:
            gptq(
                model,
                options.scheme,
                batches,
                exceptions=options.exceptions,
                activations=options.activations,
                act_order=options.act_order,
                by_loss=options.by_loss,
                fit_scales=options.fit_scales,
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
        learned_scales=options.fit_scales,
    )
    if options.fit_scales:
        fit_scales(model)
