"""`ms-compress quantize`: round a trained model without training, and export it."""

from typing import Any

import torch
from attrs import field, frozen

from ms_compress.commands.command import Command
from ms_compress.commands.finish import finish, tokens_of
from ms_compress.commands.loading import load
from ms_compress.commands.run_options import SchemeRun
from ms_compress.errors import ConfigError
from ms_compress.gptq import gptq
from ms_compress.qat import fit_scales, qat
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


def run(settings: dict[str, Any], where: str) -> int:
    """Round and export; prints the folder."""
    options = build(QuantizeRun, settings, where=where)
    model = load(options.model)
    if options.method == "gptq":
        if options.embeddings or options.head:
            raise ConfigError("gptq rounds decoder layers alone; leave embeddings and head false")
        batches = torch.split(tokens_of(options, model), options.tuning.batch_size)
        gptq(
            model,
            options.scheme,
            batches,
            exceptions=options.exceptions,
            activations=options.activations,
            by_use=options.by_use,
            by_loss=options.by_loss,
            fit_scales=options.fit_scales,
        )
    else:
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
    return finish(model, options)


QUANTIZE = Command(
    name="quantize",
    help="round a trained model to nearest or by GPTQ, and export it",
    example="ms-compress quantize RUN.toml --set method=gptq --set scheme=ct.int4_g32",
    run=run,
)
EXPORT = Command(
    name="export",
    help="write a trained model for a target, rounded to nearest; --set verify=true checks it",
    example="ms-compress export RUN.toml --set scheme=ort.matmulnbits --set verify=true",
    run=run,
)
