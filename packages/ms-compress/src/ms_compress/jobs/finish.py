"""The end of the commands that export, and the check that it can be reached, before any work."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from torch import nn

from ms_compress.commands.command import Outcome
from ms_compress.commands.options import SchemeRun
from ms_compress.deployment.export import check_export, export
from ms_compress.errors import ExportError
from ms_compress.figures import figure
from ms_compress.jobs.output import RunOutput
from ms_compress.jobs.training import outcome_of
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
    folder = export(
        model,
        options.output_dir,
        verify=options.verify,
        tokenizer=_tokenizer(options),
        on_written=place.seal,
    )
    place.end()
    size = sum(path.stat().st_size for path in folder.iterdir())
    checked = ", verified in its runtime" if options.verify else ""
    result = f"{options.scheme}, {figure(size / 1e6, 3)} MB{checked}"
    facts = {"scheme": str(options.scheme), "size_bytes": size, "verified": options.verify}
    return outcome_of(folder, result, losses, **facts)


def _tokenizer(options: SchemeRun) -> Path | None:
    """Return the tokenizer that is named, or the model's own."""
    if options.tokenizer is not None:
        return Path(options.tokenizer)
    own = options.model / "tokenizer.json"
    return own if own.is_file() else None
