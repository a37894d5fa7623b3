"""Methods with the settings of a run: its dataset, exceptions and scheme."""

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
    how: object,
    options: ModelRun,
    *,
    most: int | None = None,
    **settings: Any,
) -> None:
    """Apply a method that looks at the run's dataset, a decoder layer at a time.

    Args:
        method: `gptq` or `wanda`.
        model: changed in place.
        how: the method's scheme or pattern.
        options: of the run.
        most: rows that are looked at, at most; by default those of the run.
        settings: more arguments of the method.
    """
    rows = calibration_rows(options, model, limit=most)
    batches = torch.split(rows, options.tuning.batch_size)
    with ProgressDisplay("layer") as display:
        method(
            model,
            how,
            batches,
            exceptions=options.exceptions,
            progress=display.update,
            **settings,
        )


def round_by_gptq(model: nn.Module, options: SchemeRun, **settings: Any) -> None:
    """Round a model by GPTQ for the run's scheme."""
    calibrate(gptq, model, options.scheme, options, activations=options.activations, **settings)


def prepare(model: nn.Module, options: SchemeRun, *, learned_scales: bool) -> None:
    """Make a model's layers compute as the run's target will."""
    qat(
        model,
        options.scheme,
        exceptions=options.exceptions,
        embeddings=options.embeddings,
        head=options.head,
        activations=options.activations,
        learned_scales=learned_scales,
    )
