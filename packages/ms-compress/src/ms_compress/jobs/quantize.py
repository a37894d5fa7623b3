"""`ms-compress quantize`: round a trained model without further training, and export it."""

from torch import Tensor, nn

from ms_compress.commands.command import Outcome
from ms_compress.commands.options import QuantizeRun
from ms_compress.deployment.verification import probe
from ms_compress.errors import ConfigError, DataError
from ms_compress.evaluation.divergence import compare_logits
from ms_compress.figures import figure
from ms_compress.jobs.dataset import calibration_rows, check_tokenizers
from ms_compress.jobs.finish import check_exportable, finish
from ms_compress.jobs.loading import load
from ms_compress.jobs.methods import quantize
from ms_compress.jobs.output import run_output
from ms_compress.models.experts import separate_experts
from ms_compress.models.logits import model_logits, vocabulary_of

SAMPLE_ROWS, SAMPLE_LENGTH = 4, 128
"""Rows of the dataset, and tokens of each, on which the quality is measured."""


def run(options: QuantizeRun) -> Outcome:
    """Round and export."""
    with run_output("quantize", options) as output:
        if output.finished:
            return output.already_finished()
        check_tokenizers(options)
        model = separate_experts(load(options.model))
        check_exportable(model, options)
        sample = _sample(options, model)
        tokens = probe(vocabulary_of(model)) if sample is None else sample
        float_logits = model_logits(model, tokens)
        quantize(model, options, output)
        quality = compare_logits(float_logits, model_logits(model, tokens))
        outcome = finish(model, options, output)
        no_text = "a probe; set dataset to measure on your text"
        source = no_text if sample is None else options.dataset
        return outcome.with_line(
            f"quality: KL {figure(quality.kl)} nats per token to the float model, the same most"
            f" likely token at {quality.agreement:.1%} of positions ({tokens.numel()} tokens of"
            f" {source})",
            kl=quality.kl,
            top1_agreement=quality.agreement,
        )


def _sample(options: QuantizeRun, model: nn.Module) -> Tensor | None:
    """Return a few tokens of the dataset, (B, S) int64; None without a dataset.

    Raises:
        ConfigError, DataError: the dataset is bad, and the method needs it.
    """
    try:
        return calibration_rows(options, model, limit=SAMPLE_ROWS)[:, :SAMPLE_LENGTH]
    except (ConfigError, DataError):
        if options.method == "rtn" and not options.needs_dataset:
            return None  # rounding to nearest needs no data
        raise
