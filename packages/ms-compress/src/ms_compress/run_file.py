"""Run files: a TOML table whose keys are a trainer's own settings, plus those of its run.

A trainer states what it takes as an attrs class; this room reads the file, changes single
settings from the command line, and refuses what it does not know with the nearest known key.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from attrs import Attribute, fields

from ms_compress.errors import CompressError, ConfigError
from ms_compress.files.untrusted import read_toml
from ms_compress.settings import nearest, shown

__all__ = ["build", "read_settings"]

T = TypeVar("T")
NOT_IN_FILES = {"on_event"}
RENAMED = {"data": "dataset", "out": "output_dir", "by_use": "act_order"}
"""Keys that are not known any more."""


def read_settings(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of a run file. Paths in it are relative to the current folder.

    Args:
        path: the file.
        overrides: `key=value` or `table.key=value`, the value as in TOML; text needs no quotes.

    Raises:
        ConfigError: the file cannot be read, or an override is not one.
    """
    settings = read_toml(path, error=ConfigError)
    for override in overrides:
        _override(settings, override)
    return settings


def build(kind: type[T], settings: Mapping[str, Any], *, where: str) -> T:
    """An attrs class from settings; a table is built into the attrs class of its field.

    Args:
        kind: the class.
        settings: values by name.
        where: the file, for messages.

    Raises:
        ConfigError: a key is unknown or missing, or a value cannot be used.
    """
    known = {each.alias: each for each in fields(cast(Any, kind)) if each.init}
    for key in settings:
        if key not in known or key in NOT_IN_FILES:
            new = RENAMED.get(key)
            remedy = nearest(key, known.keys() - NOT_IN_FILES)
            remedy = f"it is called {new!r} now" if new in known else remedy
            raise ConfigError(f"{where}: unknown key {key!r}; {remedy}")
    values = {key: _value_of(known[key], value, where) for key, value in settings.items()}
    try:
        return kind(**values)
    except CompressError as error:
        raise type(error)(f"{where}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{where}: {_missing(error)}") from error


def _value_of(each: "Attribute[Any]", value: Any, where: str) -> Any:
    if nested := each.metadata.get("table"):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {each.alias} is {shown(value)}; give a table of settings")
        return build(nested, value, where=where)
    convert: Any = each.converter
    try:
        return value if convert is None else convert(value)
    except CompressError as error:
        raise type(error)(f"{where}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{where}: {each.alias} is {shown(value)}; {error}") from error


def _missing(error: TypeError) -> str:
    text = str(error)
    names = text.rpartition(":")[2].strip() if "missing" in text else text
    return f"{names} is missing; add it" if "missing" in text else names


def _override(settings: dict[str, Any], text: str) -> None:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ConfigError(f"--set {text!r} is not key=value; write --set learning_rate=1e-5")
    *tables, last = key.split(".")
    target: Any = settings
    for table in tables:
        target = target.setdefault(table, {})
        if not isinstance(target, dict):
            raise ConfigError(f"--set {text!r}: {table!r} is not a table")
    target[last] = _parse(value)


def _parse(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except RecursionError as error:
        raise ConfigError(f"--set {text[:40]}...: nested too deeply to be read") from error
    except ValueError:  # as TOML has numbers of any length, and Python has not
        return text
