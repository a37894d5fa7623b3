"""`ms-compress quantize`: round a trained model without further training, and export it."""

import torch
from torch import nn

from ms_compress.commands.command import Outcome
from ms_compress.commands.options import QuantizeRun
from ms_compress.jobs.dataset import calibration_rows, check_tokenizers
from ms_compress.jobs.finish import check_exportable, finish
from ms_compress.jobs.loading import load
from ms_compress.jobs.methods import prepare, round_by_gptq
from ms_compress.jobs.output import run_output
from ms_compress.methods.calibration import calibrate_inputs
from ms_compress.methods.qat import fit_scales


def run(options: QuantizeRun) -> Outcome:
    """Round and export."""
    with run_output("quantize", options) as output:
        if output.finished:
            return output.already_finished()
        check_tokenizers(options)
        model = load(options.model)
        check_exportable(model, options)
        _round(model, options)
        return finish(model, options, output)


def _round(model: nn.Module, options: QuantizeRun) -> None:
    if options.method == "gptq":
        round_by_gptq(
            model,
            options,
            act_order=options.act_order,
            by_loss=options.by_loss,
            fit_scales=options.fit_scales,
        )
        return
    prepare(model, options, learned_scales=options.fit_scales)
    if options.has_calibrated_inputs:
        rows = calibration_rows(options, model)
        calibrate_inputs(model, torch.split(rows, options.tuning.batch_size))
    if options.fit_scales:
        fit_scales(model)
