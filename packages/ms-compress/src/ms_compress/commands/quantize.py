"""`ms-compress quantize`: round a trained model without further training, and export it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ms_compress.methods.autoround import autoround
from ms_compress.methods.awq import Rounding, awq, smoothquant
from ms_compress.methods.calibration import calibrate_inputs
from ms_compress.methods.data_ranks import ONE_PROCESS, DataRanks
from ms_compress.methods.gptq import gptq
from ms_compress.methods.importance import input_importance
from ms_compress.methods.kv_cache import calibrate_kv_cache
from ms_compress.methods.qat import fit_scales, qat
from ms_compress.models.experts import separate_experts
from ms_compress.options import QuantizeRun
from ms_compress.run.dataset import calibration_batches, check_tokenizers
from ms_compress.run.export import check_exportable, export_run
from ms_compress.run.model import load
from ms_compress.run.outcome import Outcome
from ms_compress.run.output import RunOutput, run_output
from ms_compress.run.progress import ProgressDisplay
from ms_compress.run.quality import QualityTest
from ms_compress.training.checkpoint import BlockFiles


def run(options: QuantizeRun) -> Outcome:
    """Round, export, and measure the quality."""
    with DataRanks.of_launch() as ranks, run_output("quantize", options, ranks) as output:
        if output.finished:
            return output.already_finished()
        check_tokenizers(options)
        model = separate_experts(load(options.model))
        check_exportable(model, options)
        test = QualityTest.of(model, options)
        quantize(model, options, output, ranks)
        ranks.leave()
        if not ranks.is_first:  # the first process measures and writes
            return Outcome(lines=(), facts={})
        quality = test.measure(model)
        outcome = export_run(model, options, output, quality=quality)
        return outcome.with_line(
            f"quality: {quality}",
            kl=quality.kl,
            top1_agreement=quality.agreement,
            perplexity=quality.perplexity,
            float_perplexity=quality.float_perplexity,
        )


def quantize(
    model: nn.Module,
    options: QuantizeRun,
    output: RunOutput | None = None,
    ranks: DataRanks = ONE_PROCESS,
) -> None:
    """Prepare a model for the run's scheme and round it with the run's method, in place.

    Args:
        model: model to change in place.
        options: settings of the run.
        output: run output, next to which finished decoder layers are stored, so that a killed run
            resumes. None: nothing is stored.
        ranks: processes that share the calibration batches.
    """
    batches: Sequence[Tensor] = ()
    if options.method != "rtn" or options.needs_dataset:
        batches = calibration_batches(options, model)
    checkpoint = None if output is None else output.layer_checkpoint(batches, ranks.count)
    if batches:
        batches = ranks.share(batches)
    if options.method == "rtn":
        _round_to_nearest(model, options, batches, ranks)
    else:
        _calibrate(model, options, batches, ranks, checkpoint)
    if options.kv_cache == "fp8":  # last, as the quantized model computes keys and values
        calibrate_kv_cache(model, batches, ranks=ranks)


def _calibrate(
    model: nn.Module,
    options: QuantizeRun,
    batches: Sequence[Tensor],
    ranks: DataRanks,
    checkpoint: BlockFiles | None,
) -> None:
    # In `a+b`, method a scales the features and method b rounds.
    first, _, second = options.method.partition("+")
    rounding: Rounding = second or "rtn"  # type: ignore[assignment]  # a choice of METHODS
    settings: dict[str, Any] = {
        "ignore": options.ignore,
        "activations": options.activations,
        "checkpoint": checkpoint,
        "ranks": ranks,
    }
    if first != "autoround":
        settings |= {"act_order": options.act_order, "by_loss": options.by_loss}
    if first != "gptq":
        settings["iters"] = options.iters
    with ProgressDisplay("layer", active=ranks.is_first) as display:
        settings["progress"] = display.update
        if first == "awq":  # always fits scales
            awq(model, options.scheme, batches, rounding=rounding, **settings)
            return
        settings["fit_scales"] = options.fit_scales
        if first == "gptq":
            gptq(model, options.scheme, batches, **settings)
        elif first == "autoround":
            autoround(model, options.scheme, batches, **settings)
        else:
            smoothquant(model, options.scheme, batches, rounding=rounding, **settings)


def _round_to_nearest(
    model: nn.Module, options: QuantizeRun, batches: Sequence[Tensor], ranks: DataRanks
) -> None:
    # K-quants always search for their scales, as in llama.cpp.
    searches_scales = (
        options.fit_scales or options.importance or options.scheme.super_block is not None
    )
    importance: dict[str, Tensor] = {}
    if options.importance:
        with ProgressDisplay("layer", active=ranks.is_first) as display:
            importance = input_importance(
                model, batches, ignore=options.ignore, progress=display.update, ranks=ranks
            )
    qat(
        model,
        options.scheme,
        ignore=options.ignore,
        embeddings=options.embeddings,
        head=options.head,
        activations=options.activations,
        learned_scales=searches_scales,
    )
    if options.has_calibrated_inputs:
        calibrate_inputs(model, batches, ranks=ranks)
    if searches_scales:
        fit_scales(model, importance)
