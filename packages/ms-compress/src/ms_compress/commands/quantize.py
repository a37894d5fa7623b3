"""`ms-compress quantize`: round a trained model without training, and export it."""

from typing import Any

import torch
from attrs import field, frozen
from torch import nn

from ms_compress.commands.command import Command
from ms_compress.commands.finish import calibration_of, check, finish
from ms_compress.commands.loading import load
from ms_compress.commands.progress import Shown
from ms_compress.commands.run_options import SchemeRun
from ms_compress.commands.training import output
from ms_compress.errors import ConfigError
from ms_compress.gptq_rounding import gptq
from ms_compress.preparation import fit_scales, qat
from ms_compress.run_file import build
from ms_compress.settings import flag, one_of

__all__ = ["EXPORT", "QUANTIZE"]


@frozen(kw_only=True)
class QuantizeRun(SchemeRun):
    """Settings of the command."""

    method: str = field(default="rtn", validator=one_of("rtn", "gptq"))
    """Round to nearest, or GPTQ with the dataset's tokens."""
    fit_scales: bool = field(default=False, validator=flag)
    """Search for the scale of each group that errs least."""
    by_use: bool = field(default=False, validator=flag)
    """Let GPTQ round columns of the largest inputs first."""
    by_loss: bool = field(default=False, validator=flag)
    """Let GPTQ count errors by what they do to the model's predictions."""

    def __attrs_post_init__(self) -> None:
        if self.method == "gptq" and (self.embeddings or self.head):
            raise ConfigError("gptq rounds decoder layers alone; leave embeddings and head false")


def run(settings: dict[str, Any], where: str) -> int:
    """Round and export; prints the folder."""
    options = build(QuantizeRun, settings, where=where)
    with output(options):
        model = load(options.model)
        check(model, options)
        _round(model, options)
        return finish(model, options)


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
                by_use=options.by_use,
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


QUANTIZE = Command(
    name="quantize",
    help="round a trained model to nearest or by GPTQ, and export it",
    example="ms-compress quantize RUN.toml --set method=gptq --set scheme=ct.int4_g32",
    run=run,
    flags=("verify",),
)
EXPORT = Command(
    name="export",
    help="write a trained model for a target, rounded to nearest; --verify checks it",
    example="ms-compress export RUN.toml --set scheme=ort.matmulnbits --verify",
    run=run,
    flags=("verify",),
)
