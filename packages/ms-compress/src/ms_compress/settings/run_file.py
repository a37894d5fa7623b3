# A copy of shared_source/settings/run_file.py, made by `nox -s copies`; change it there.
"""Run files: a TOML table whose keys are the settings of an attrs class.

A command's settings are an attrs class; this module reads the file, changes single settings from
the command line, and refuses what the class does not know, naming the nearest known key.
"""

import tomllib
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from attrs import Attribute, fields

from ..entry import path_argument
from ..errors import ConfigError
from ..files.untrusted import read_toml
from .validators import nearest, shown

T = TypeVar("T")
NOT_IN_FILES = {"on_event"}
FAILURE: type[Exception] = ConfigError.__bases__[0]
"""The base of the package's errors."""


def add_run_file(parser: ArgumentParser) -> None:
    """Let a command take a run file, and changes of single settings."""
    parser.add_argument(
        "run_file",
        type=path_argument,
        metavar="RUN.toml",
        help="settings of the run, in TOML",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one setting; table.key=value reaches into a table",
    )


def read_settings(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read the settings of a run file. Paths in it are relative to the current folder.

    Args:
        path: the file.
        overrides: `key=value` or `table.key=value`, the value as in TOML; text needs no quotes.

    Raises:
        ConfigError: the file cannot be read, or an override is not one.
    """
    settings = read_toml(path, error=ConfigError)
    for text in overrides:
        override(settings, text)
    return settings


def build(kind: type[T], settings: Mapping[str, Any], *, where: str) -> T:
    """Build an attrs class from settings; a table is built into the attrs class of its field.

    Args:
        kind: the class.
        settings: values by name.
        where: the file, for messages.

    Raises:
        ConfigError: a key is unknown or missing, or a value cannot be used.
    """
    known = {each.alias: each for each in fields(cast(Any, kind)) if each.init}
    names = known.keys() - NOT_IN_FILES
    for key in settings:
        if key not in names:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, names)}")
    values = {key: _value_of(known[key], value, where) for key, value in settings.items()}
    try:
        return kind(**values)
    except FAILURE as error:
        raise type(error)(f"{where}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{where}: {_missing(error)}") from error


def table_of(kind: type[T], name: str) -> Callable[[Any], T]:
    """Make a converter of a field that holds settings of an attrs class, or a table of them.

    Args:
        kind: the class.
        name: of the field, for messages.

    Returns:
        A function that raises ConfigError for whatever is neither.
    """

    def converted(value: Any) -> T:
        if isinstance(value, kind):
            return value
        if isinstance(value, Mapping):
            return build(kind, value, where=name)
        names = ", ".join(each.alias for each in fields(cast(Any, kind)) if each.init)
        raise ConfigError(
            f"{name} must be {kind.__name__} or a table of {names}, got {shown(value)}"
        )

    return converted


def refuse_renamed(settings: Mapping[str, Any], renamed: Mapping[str, str], *, where: str) -> None:
    """Refuse keys that go by another name now.

    Raises:
        ConfigError: names both.
    """
    for old, new in renamed.items():
        if old in settings:
            raise ConfigError(f"{where}: {old!r} is called {new!r} now; rename it")


def override(settings: dict[str, Any], text: str) -> None:
    """Change one setting in place, as `--set key=value` or `--set table.key=value` says.

    Raises:
        ConfigError: it is not of this form, or what it names as a table is not one.
    """
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


def _value_of(each: "Attribute[Any]", value: Any, where: str) -> Any:
    nested = each.metadata.get("table")
    if nested is not None and not isinstance(value, nested):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {each.alias} is {shown(value)}; give a table of settings")
        return build(nested, value, where=where)
    if nested is not None or each.converter is None:
        return value
    try:
        return cast(Any, each.converter)(value)
    except FAILURE as error:
        raise type(error)(f"{where}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{where}: {each.alias} is {shown(value)}; {error}") from error


def _missing(error: TypeError) -> str:
    text = str(error)
    names = text.rpartition(":")[2].strip() if "missing" in text else text
    return f"{names} is missing; add it" if "missing" in text else names


def _parse(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except RecursionError as error:
        raise ConfigError(f"--set {text[:40]}...: nested too deeply to be read") from error
    except ValueError:  # no TOML, or a number of more digits than Python reads: a text
        return text
