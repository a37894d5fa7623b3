"""Final step of the commands that export, and an early check that it will succeed."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from ms_compress.commands.command import Outcome
from ms_compress.commands.options import SchemeRun
from ms_compress.deployment.assets import carry_files
from ms_compress.deployment.export import check_export, export
from ms_compress.errors import ExportError
from ms_compress.figures import figure
from ms_compress.jobs.output import RunOutput
from ms_compress.jobs.progress import ProgressDisplay
from ms_compress.jobs.training import outcome_of
from ms_compress.targets.safetensors_folder import stored_dtypes
from ms_compress.targets.target import find_target


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
    tokenizer = _tokenizer(options)
    check_export(model, options.scheme, tokenizer=tokenizer)
    if target.needs_tokenizer and tokenizer is None:
        raise ExportError(
            f"{options.model} has no tokenizer.json, which {target.runtime} needs to read text; set"
            " tokenizer to one"
        )


def finish(
    model: nn.Module, options: SchemeRun, output: RunOutput, losses: Sequence[float] = ()
) -> Outcome:
    """Export a model and report the folder, size and remaining float layers."""
    in_float = float_layers(model)  # for the report
    keeps_dtypes = find_target(options.scheme.target).keeps_stored_dtypes

    def complete(partial: Path) -> None:
        carry_files(options.model, partial, tokenizer=options.tokenizer is None)
        output.seal(partial)

    with ProgressDisplay("tensor") as display:
        folder = export(
            model,
            options.output_dir,
            verify=options.verify,
            tokenizer=_tokenizer(options),
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
    outcome = outcome_of(folder, result, losses, **facts)
    serve = find_target(options.scheme.target).serve
    return outcome.with_line(f"serve: {serve.format(folder=folder)}") if serve else outcome


def float_layers(model: nn.Module) -> list[str]:
    """Return the names of linear layers, including the output head, with float weights."""
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and getattr(layer, "scheme", None) is None
    ]


def _tokenizer(options: SchemeRun) -> Path | None:
    """Return the tokenizer from the settings, or the model folder's."""
    if options.tokenizer is not None:
        return Path(options.tokenizer)
    default = options.model / "tokenizer.json"
    return default if default.is_file() else None
