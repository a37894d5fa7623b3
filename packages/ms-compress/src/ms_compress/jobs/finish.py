"""The end of the commands that export, and the check that it can be reached, before any work."""

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
from ms_compress.jobs.training import outcome_of
from ms_compress.targets.safetensors_folder import stored_dtypes
from ms_compress.targets.target import find_target


def check_exportable(model: nn.Module, options: SchemeRun) -> None:
    """Refuse, before any work, what cannot be exported or verified after it.

    Raises:
        ExportError: the target does not take the model or the tokenizer, or a library is missing.
        LayerError: the target does not take a layer.
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
            f"{options.model} has no tokenizer.json, and {target.runtime} reads no text without"
            " one; give it as tokenizer"
        )


def finish(
    model: nn.Module, options: SchemeRun, place: RunOutput, losses: Sequence[float] = ()
) -> Outcome:
    """Export a model, and say where it lies."""
    left = float_layers(model)

    def complete(aside: Path) -> None:
        carry_files(options.model, aside, tokenizer=options.tokenizer is None)
        place.seal(aside)

    folder = export(
        model,
        options.output_dir,
        verify=options.verify,
        tokenizer=_tokenizer(options),
        stored_dtypes=stored_dtypes(options.model) if options.scheme.target == "ct" else {},
        on_written=complete,
    )
    place.end()
    size = sum(path.stat().st_size for path in folder.iterdir())
    checked = ", verified in its runtime" if options.verify else ""
    result = f"{options.scheme}, {figure(size / 1e6, 3)} MB{checked}"
    facts: dict[str, Any] = {
        "scheme": str(options.scheme),
        "size_bytes": size,
        "verified": options.verify,
    }
    facts |= {"float_layers": left, "float_layer_count": len(left)}
    return outcome_of(folder, result, losses, **facts)


def float_layers(model: nn.Module) -> list[str]:
    """Return the names of linear layers, the output head included, whose weights stay in float."""
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and getattr(layer, "scheme", None) is None
    ]


def _tokenizer(options: SchemeRun) -> Path | None:
    """Return the tokenizer that is named, or the model's own."""
    if options.tokenizer is not None:
        return Path(options.tokenizer)
    own = options.model / "tokenizer.json"
    return own if own.is_file() else None
