"""Apply methods with the settings of a run: its dataset, exceptions and scheme."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ms_compress.commands.options import ModelRun, QuantizeRun, SchemeRun
from ms_compress.jobs.dataset import calibration_rows
from ms_compress.jobs.output import RunOutput
from ms_compress.jobs.progress import ProgressDisplay
from ms_compress.methods.awq import awq, smoothquant
from ms_compress.methods.calibration import calibrate_inputs
from ms_compress.methods.gptq import gptq
from ms_compress.methods.importance import input_importance
from ms_compress.methods.qat import fit_scales, qat


def calibrate(
    method: Callable[..., None],
    model: nn.Module,
    target: object,
    options: ModelRun,
    *,
    limit: int | None = None,
    output: RunOutput | None = None,
    **settings: Any,
) -> None:
    """Apply a method that needs calibration data, with progress by decoder layer.

    Args:
        method: `gptq`, `awq`, `smoothquant` or `wanda`.
        model: model to change in place.
        target: the method's scheme or pattern.
        options: settings of the run.
        limit: maximum number of calibration rows. None: the run's rows.
        output: the run's output, next to which finished decoder layers are stored, so that a killed
            run resumes. None: nothing is stored.
        settings: further arguments of the method.
    """
    rows = calibration_rows(options, model, limit=limit)
    batches = torch.split(rows, options.tuning.batch_size)  # (B, S) each
    if output is not None:
        settings["checkpoint"] = output.layer_checkpoint(batches)
    with ProgressDisplay("layer") as display:
        method(
            model,
            target,
            batches,
            ignore=options.ignore,
            progress=display.update,
            **settings,
        )


def round_by_gptq(model: nn.Module, options: SchemeRun, **settings: Any) -> None:
    """Round a model with GPTQ to the run's scheme."""
    calibrate(gptq, model, options.scheme, options, activations=options.activations, **settings)


def quantize(model: nn.Module, options: QuantizeRun, output: RunOutput | None = None) -> None:
    """Prepare a model for the run's scheme and round it with the run's method.

    Args:
        model: model to change in place.
        options: settings of the run.
        output: output to resume from, if the method calibrates. None: nothing is stored.
    """
    if options.method == "rtn":
        # K-quants always search for their scales, as in llama.cpp.
        fits = options.fit_scales or options.importance or options.scheme.super_block is not None
        importance = calibrated_importance(model, options) if options.importance else {}
        prepare(model, options, learned_scales=fits)
        if options.has_calibrated_inputs:
            rows = calibration_rows(options, model)
            calibrate_inputs(model, torch.split(rows, options.tuning.batch_size))
        if fits:
            fit_scales(model, importance)
        return
    methods: dict[str, Callable[..., None]] = {
        "gptq": gptq,
        "awq": awq,
        "smoothquant": smoothquant,
    }
    first, _, rounding = options.method.partition("+")
    settings: dict[str, Any] = {"act_order": options.act_order, "by_loss": options.by_loss}
    if first != "gptq":
        settings["rounding"] = rounding or "rtn"
    if first != "awq":
        settings["fit_scales"] = options.fit_scales
    calibrate(
        methods[first],
        model,
        options.scheme,
        options,
        output=output,
        activations=options.activations,
        **settings,
    )


def calibrated_importance(model: nn.Module, options: SchemeRun) -> dict[str, Tensor]:
    """Return the mean square of each linear layer's inputs on the run's dataset, by name."""
    rows = calibration_rows(options, model)
    with ProgressDisplay("layer") as display:
        return input_importance(
            model,
            torch.split(rows, options.tuning.batch_size),
            ignore=options.ignore,
            progress=display.update,
        )


def prepare(model: nn.Module, options: SchemeRun, *, learned_scales: bool) -> None:
    """Prepare a model's layers to compute like the run's target."""
    qat(
        model,
        options.scheme,
        ignore=options.ignore,
        embeddings=options.embeddings,
        head=options.head,
        activations=options.activations,
        learned_scales=learned_scales,
    )
