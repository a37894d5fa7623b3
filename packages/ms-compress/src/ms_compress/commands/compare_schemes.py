"""`ms-compress compare-schemes`: quantize a model to several schemes, and draw size against KL."""

from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import msgspec
from torch import nn

from ms_compress.commands.quantize import quantize
from ms_compress.deployment.export import export
from ms_compress.files.durable import write_file, writing
from ms_compress.models.experts import separate_experts
from ms_compress.options import CompareRun, QuantizeRun
from ms_compress.output_lock import new_folder
from ms_compress.report.schemes import (
    SchemeComparison,
    SchemeResult,
    schemes_page,
    schemes_table,
)
from ms_compress.run.dataset import check_tokenizers
from ms_compress.run.export import check_exportable, tokenizer_of, weight_bytes
from ms_compress.run.model import load
from ms_compress.run.outcome import Outcome
from ms_compress.run.output import run_output
from ms_compress.run.progress import ProgressDisplay
from ms_compress.run.quality import QualityTest
from ms_compress.targets.safetensors_folder import stored_dtypes
from ms_compress.targets.target import find_target


def run(options: CompareRun) -> Outcome:
    """Quantize with every pair, measure, and write `schemes.json`, `.txt` and `.html`."""
    with run_output("compare-schemes", options) as output:
        if output.finished:
            return output.already_finished()
        check_tokenizers(options)
        runs = options.runs()
        model = separate_experts(load(options.model))
        for item in runs:
            check_exportable(model, item)
        # The dataset must be usable if any of the runs needs it.
        test = QualityTest.of(model, max(runs, key=lambda item: item.method != "rtn"))
        float_quality = test.measure(model)
        results = []
        with ProgressDisplay("scheme") as display:
            for number, item in enumerate(runs):
                display.update(number, len(runs), f"{item.scheme} {item.method}")
                results.append(_result(item, test))
            display.update(len(runs), len(runs))
        comparison = SchemeComparison(
            model=options.model.name,
            tokens=float_quality.tokens,
            source=float_quality.source,
            float_size_bytes=weight_bytes(options.model),
            float_perplexity=float_quality.float_perplexity,
            results=tuple(results),
        )
        text = schemes_table(comparison)
        with new_folder(options.output_dir) as partial, writing(options.output_dir):
            document = msgspec.json.format(msgspec.json.encode(comparison))
            write_file(partial / "schemes.json", document)
            write_file(partial / "schemes.txt", text.encode())
            write_file(partial / "schemes.html", schemes_page(comparison).encode())
            output.seal(partial)
        lines = (*text.splitlines(), f"page: {options.output_dir / 'schemes.html'}")
        return Outcome(lines=lines, facts=msgspec.to_builtins(comparison))


def _result(options: QuantizeRun, test: QualityTest) -> SchemeResult:
    """Quantize the model with one scheme and method; measure quality and exported size."""
    model: nn.Module = separate_experts(load(options.model))
    start_s = perf_counter()
    quantize(model, options)
    seconds = perf_counter() - start_s
    quality = test.measure(model)
    keeps_dtypes = find_target(options.scheme.target).keeps_stored_dtypes
    with TemporaryDirectory() as name:
        folder = export(
            model,
            Path(name) / "model",
            tokenizer=tokenizer_of(options),
            stored_dtypes=stored_dtypes(options.model) if keeps_dtypes else {},
        )
        size = weight_bytes(folder)
    return SchemeResult(
        scheme=str(options.scheme),
        method=options.method,
        size_bytes=size,
        kl=quality.kl,
        agreement=quality.agreement,
        perplexity=quality.perplexity,
        seconds=seconds,
    )
