"""Export of a run's model with its model card, and an early check that it will succeed."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from ms_compress.deployment import model_card
from ms_compress.deployment.assets import carry_files
from ms_compress.deployment.export import check_export, export
from ms_compress.errors import ExportError
from ms_compress.figures import figure
from ms_compress.files.durable import write_file
from ms_compress.methods.kv_cache import check_kv_cache
from ms_compress.options import QuantizeRun, SchemeRun
from ms_compress.quantization.scheme import Activations, Scheme
from ms_compress.run.outcome import Outcome
from ms_compress.run.output import RunOutput
from ms_compress.run.progress import ProgressDisplay
from ms_compress.run.quality import Quality
from ms_compress.targets.safetensors_folder import stored_dtypes
from ms_compress.targets.target import find_target
from ms_compress.training.checkpoint import is_digest

CALIBRATION = ("tuning.batch_size", "tuning.sequence_length")
"""Training settings that calibration also uses."""


def check_exportable(model: nn.Module, options: SchemeRun) -> None:
    """Check, before any work, that the result can be exported and verified.

    Raises:
        ExportError: the target does not support the model or tokenizer, or a library is missing.
        LayerError: the target does not support a layer.
    """
    target = find_target(options.scheme.target)
    missing = [name for name in target.libraries if find_spec(name) is None]
    if options.verify and missing:
        raise ExportError(
            f"verify needs {' and '.join(missing)}: pip install 'ms-compress[{target.extra}]',"
            " or leave verify out"
        )
    tokenizer = tokenizer_of(options)
    check_export(model, options.scheme, tokenizer=tokenizer)
    if isinstance(options, QuantizeRun) and options.kv_cache != "none":
        if not target.reads_kv_cache_scales:
            raise ExportError(
                f"kv_cache={options.kv_cache!r} needs a ct.* scheme, which vLLM reads, got"
                f" {options.scheme}; use one such as ct.fp8_dynamic, or leave kv_cache out"
            )
        check_kv_cache(model)
    if target.needs_tokenizer and tokenizer is None:
        raise ExportError(
            f"{options.model} has no tokenizer.json, which {target.runtime} needs to read text; set"
            " tokenizer to one"
        )


def export_run(
    model: nn.Module,
    options: SchemeRun,
    output: RunOutput,
    losses: Sequence[float] = (),
    quality: Quality | None = None,
) -> Outcome:
    """Export a model with a model card, and report the folder, size and remaining float layers."""
    in_float = float_layers(model)  # for the report
    keeps_dtypes = find_target(options.scheme.target).keeps_stored_dtypes

    def complete(partial: Path) -> None:
        carry_files(options.model, partial, tokenizer=options.tokenizer is None)
        card = _model_card(partial, options, output, in_float, losses, quality)
        write_file(partial / model_card.FILE, card.encode())
        output.seal(partial)

    with ProgressDisplay("tensor") as display:
        folder = export(
            model,
            options.output_dir,
            verify=options.verify,
            tokenizer=tokenizer_of(options),
            stored_dtypes=stored_dtypes(options.model) if keeps_dtypes else {},
            on_written=complete,
            progress=display.update,
        )
    output.end()
    size = sum(path.stat().st_size for path in folder.iterdir())
    checked = ", verified in its runtime" if options.verify else ""
    result = f"{options.scheme}, {figure(size / 1e6, 3)} MB{checked}"
    facts: dict[str, Any] = {
        "scheme": str(options.scheme),
        "size_bytes": size,
        "verified": options.verify,
    }
    facts |= {"float_layers": in_float, "float_layer_count": len(in_float)}
    outcome = Outcome.of_folder(folder, result, losses, **facts)
    serve = find_target(options.scheme.target).serve
    return outcome.with_line(f"serve: {serve.format(folder=folder)}") if serve else outcome


def _model_card(
    folder: Path,
    options: SchemeRun,
    output: RunOutput,
    in_float: Sequence[str],
    losses: Sequence[float],
    quality: Quality | None,
) -> str:
    """Return the model card of a folder whose other files are complete."""
    target = find_target(options.scheme.target)
    facts = [("Scheme", describe(options.scheme))]
    if losses:
        facts.append(("Training", f"{len(losses)} steps, loss to {figure(losses[-1])}"))
    if isinstance(options, QuantizeRun):
        reads_data = options.method != "rtn" or options.needs_dataset
        length = options.tuning.sequence_length + 1
        rows = f", calibrated on at most {options.rows} rows of {length} tokens"
        facts.append(("Method", f"{options.method}{rows if reads_data else ''}"))
    before, after = (weight_bytes(path) for path in (options.model, folder))
    facts.append(("Weights", f"{figure(after / 1e6, 3)} MB (before: {figure(before / 1e6, 3)} MB)"))
    names = f"{', '.join(in_float[:8])}{', ...' if len(in_float) > 8 else ''}"
    facts.append(("Layers in float", names or "none"))
    if quality is not None:
        facts.append(("Quality", str(quality)))
    return model_card.model_card(
        name=output.folder.name,
        base=options.model,
        scheme=str(options.scheme),
        facts=facts,
        settings={
            name: value
            for name, value in output.run.settings.items()
            if value not in (None, False, [])
            and not is_digest(value)
            and (losses or not name.startswith("tuning.") or name in CALIBRATION)
        },
        run=[
            f"{language}\n{code.format(folder=output.folder.name)}"
            for language, code in (("bash", target.serve), ("python", target.example))
            if code
        ],
    )


def describe(scheme: Scheme) -> str:
    """Describe a scheme, such as `4-bit integers, groups of 32; inputs: float32`."""

    def words(rule: Scheme | Activations) -> str:
        kind = "integers" if rule.element is None else rule.element.name.upper()
        block = getattr(rule, "block_structure", None)
        scope = {
            "group": f"groups of {rule.group_size}",
            "tensor_group": f"groups of {rule.group_size} and one scale for the tensor",
            "block": f"blocks of {block and ' x '.join(map(str, block))}",
            "tensor": "one scale",
            "channel": "one scale per row",
            "token": "one scale per token",
        }[rule.strategy]
        return f"{rule.num_bits}-bit {kind}, {scope}"

    inputs = "not quantized" if scheme.activations is None else words(scheme.activations)
    return f"{scheme}: weights {words(scheme)}; inputs {inputs}"


def weight_bytes(folder: Path) -> int:
    """Return the total size of the weight files, in bytes."""
    suffixes = (".safetensors", ".gguf", ".onnx", ".data", ".bin")
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in suffixes)


def float_layers(model: nn.Module) -> list[str]:
    """Return the names of linear layers, including the output head, with float weights."""
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and getattr(layer, "scheme", None) is None
    ]


def tokenizer_of(options: SchemeRun) -> Path | None:
    """Return the tokenizer from the settings, or the model folder's."""
    if options.tokenizer is not None:
        return Path(options.tokenizer)
    default = options.model / "tokenizer.json"
    return default if default.is_file() else None
