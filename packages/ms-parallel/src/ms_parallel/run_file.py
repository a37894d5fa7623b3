"""Run files: a TOML table of exactly the settings that `DistributedTrainer` takes."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import fields, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.layout import Layout
from ms_parallel.models import DecoderConfig
from ms_parallel.settings import nearest
from ms_parallel.trainer import DistributedTrainer

__all__ = ["RunFile", "read_run_file"]

LENGTH = ("dataset_path", "epochs", "steps")
NOT_IN_FILES = "on_event"


@frozen(kw_only=True)
class RunFile:
    """A trainer, and what it is to train on for how long."""

    trainer: DistributedTrainer
    dataset_path: str
    epochs: float | None = None
    steps: int | None = None


def read_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read a run file. Paths in it are relative to the current folder.

    Args:
        path: the file.
        overrides: `key=value` or `table.key=value`, the value as in TOML; text needs no quotes.

    Raises:
        ConfigError: the file cannot be read, a key is unknown (the nearest known one is named),
            or a value cannot be used.
    """
    try:
        settings = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    for override in overrides:
        _override(settings, override)
    try:
        return _run_file(settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _run_file(settings: dict[str, Any]) -> RunFile:
    known = [f.name for f in fields(DistributedTrainer) if f.init and f.name != NOT_IN_FILES]
    for key in settings:
        if key not in known and key not in LENGTH:
            raise ConfigError(_unknown(key, [*known, *LENGTH]))
    for key in ("model_arch", "dataset_path"):
        if not isinstance(settings.get(key), str):
            raise ConfigError(f"{key} is missing; give a text, such as {key} = {EXAMPLES[key]!r}")
    length = {key: settings.pop(key) for key in LENGTH if key in settings}
    if len(length) != 2:
        both = "both" if len(length) == 3 else "neither"
        raise ConfigError(f"{both} of epochs and steps given; give one of them")
    return RunFile(trainer=DistributedTrainer(**settings), **length)


EXAMPLES = {"model_arch": "llama", "dataset_path": "corpus/"}


def _unknown(key: str, known: Sequence[str]) -> str:
    """Names the nearest known key, and looks into the tables too."""
    inside = {setting.name: f"model_config.{setting.name}" for setting in fields(DecoderConfig)}
    inside |= {axis.name: f"parallel_config.{axis.name}" for axis in fields(Layout)}
    if key in inside:
        return f"unknown key {key!r}; did you mean {inside[key]!r}?"
    return f"unknown key {key!r}; {nearest(key, known)}"


def _override(settings: dict[str, Any], text: str) -> None:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ConfigError(f"--set {text!r} is not key=value; write --set learning_rate=1e-3")
    *tables, last = key.split(".")
    target: Any = settings
    for table in tables:
        target = target.setdefault(table, {})
        if not isinstance(target, dict):
            raise ConfigError(f"--set {text!r}: {table!r} is not a table")
    target[last] = _value(value)


def _value(text: str) -> object:
    try:
        table: Mapping[str, object] = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"]
