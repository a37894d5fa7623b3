"""`ms-compress quantize`: round a trained model without further training, and export it."""

from ms_compress.commands.command import Outcome
from ms_compress.commands.options import QuantizeRun
from ms_compress.jobs.dataset import check_tokenizers
from ms_compress.jobs.finish import check_exportable, finish
from ms_compress.jobs.loading import load
from ms_compress.jobs.methods import quantize
from ms_compress.jobs.output import run_output
from ms_compress.jobs.quality import QualityTest
from ms_compress.models.experts import separate_experts


def run(options: QuantizeRun) -> Outcome:
    """Round, export, and measure the quality."""
    with run_output("quantize", options) as output:
        if output.finished:
            return output.already_finished()
        check_tokenizers(options)
        model = separate_experts(load(options.model))
        check_exportable(model, options)
        test = QualityTest.of(model, options)
        quantize(model, options, output)
        quality = test.measure(model)
        outcome = finish(model, options, output, quality=quality)
        return outcome.with_line(
            f"quality: {quality}",
            kl=quality.kl,
            top1_agreement=quality.agreement,
            perplexity=quality.perplexity,
            float_perplexity=quality.float_perplexity,
        )
