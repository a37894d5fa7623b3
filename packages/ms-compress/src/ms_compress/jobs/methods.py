"""Apply methods with the settings of a run: its dataset, exceptions and scheme."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ms_compress.commands.options import ModelRun, SchemeRun
from ms_compress.jobs.dataset import calibration_rows
from ms_compress.jobs.progress import ProgressDisplay
from ms_compress.methods.gptq import gptq
from ms_compress.methods.qat import qat


def calibrate(
    method: Callable[..., None],
    model: nn.Module,
    target: object,
    options: ModelRun,
    *,
    limit: int | None = None,
    **settings: Any,
) -> None:
    """Apply a method that needs calibration data, with progress by decoder layer.

    Args:
        method: `gptq` or `wanda`.
        model: model to change in place.
        target: the method's scheme or pattern.
        options: settings of the run.
        limit: maximum number of calibration rows. None: the run's rows.
        settings: further arguments of the method.
    """
    rows = calibration_rows(options, model, limit=limit)
    batches = torch.split(rows, options.tuning.batch_size)  # (B, S) each
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
