"""What commands do last, export a model, and what they ask before: whether it can be done."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ms_compress.commands.command import Outcome
from ms_compress.commands.options import ModelRun, SchemeRun
from ms_compress.deployment.export import check_export, export
from ms_compress.errors import ConfigError, DataError, ExportError
from ms_compress.jobs.output import RunOutput
from ms_compress.targets.target import find_target
from ms_compress.training.corpus import read_batch, read_tokens

__all__ = ["calibration_of", "check", "finish", "text_of", "training_of"]


def text_of(options: ModelRun, model: nn.Module) -> dict[str, Tensor]:
    """Rows of the run's dataset to train on: tokens, and the targets that count.

    Raises:
        ConfigError: none was given.
        DataError: there is too little of it, or the model's vocabulary does not hold it.
    """
    length = options.tuning.sequence_length
    found = read_batch(_dataset(options), count=options.rows, length=length, chat=options.model)
    _check_vocabulary(options, model, found["tokens"])
    return found


def calibration_of(options: ModelRun, model: nn.Module, *, most: int | None = None) -> Tensor:
    """Rows of the run's dataset to calibrate on, (R, S) int64.

    Raises:
        ConfigError, DataError: as of `text_of`.
    """
    count = options.rows if most is None else min(options.rows, most)
    length = options.tuning.sequence_length + 1
    found = read_tokens(_dataset(options), count=count, length=length, chat=options.model)
    _check_vocabulary(options, model, found)
    return found


def _dataset(options: ModelRun) -> Path:
    if options.dataset is None:
        raise ConfigError(
            "dataset is missing; give a folder of shards, conversations in JSON Lines, or a JSON"
            " list of tokens"
        )
    return options.dataset


def _check_vocabulary(options: ModelRun, model: nn.Module, tokens: Tensor) -> None:
    vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr,arg-type]
    if int(tokens.max()) >= vocabulary or int(tokens.min()) < 0:
        raise DataError(
            f"{options.dataset}: its tokens are {int(tokens.min())} to {int(tokens.max())}, and"
            f" {options.model} has a vocabulary of {vocabulary}; use the model's own tokenizer"
        )


def check(model: nn.Module, options: SchemeRun) -> None:
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
    """Export, and say where."""
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
    told, facts = training_of(losses)
    return Outcome(
        lines=(*told, f"{folder}: {options.scheme}, {size / 1e6:.2f} MB{checked}"),
        facts={
            "folder": str(folder),
            "scheme": str(options.scheme),
            "size_bytes": size,
            "verified": options.verify,
            **facts,
        },
    )


def training_of(losses: Sequence[float]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """What is said of a training: for people, and as facts."""
    if not losses:
        return (), {}
    line = f"trained {len(losses)} steps: loss {losses[0]:.4f} to {losses[-1]:.4f}"
    return (line,), {"steps": len(losses), "first_loss": losses[0], "last_loss": losses[-1]}


def _tokenizer(options: SchemeRun) -> Path | None:
    """The one that is named, or the model's own."""
    if options.tokenizer is not None:
        return Path(options.tokenizer)
    own = options.model / "tokenizer.json"
    return own if own.is_file() else None
