"""Run files: TOML files whose keys are the fields of an attrs class of settings.

Reads the file, applies overrides from the command line, and builds the settings class. An unknown
key is rejected with the nearest known key.
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
from .synonyms import nearest_key
from .validators import short_repr

T = TypeVar("T")
NOT_IN_FILES = {"on_event"}
FAILURE: type[Exception] = ConfigError.__bases__[0]
"""Base class of the package's errors."""


def add_run_file(parser: ArgumentParser) -> None:
    """Add the run file and its overrides, `KEY=VALUE` or `--set KEY=VALUE`, to a command."""
    parser.add_argument(
        "run_file",
        type=path_argument,
        metavar="RUN.toml",
        help="settings of the run, in TOML",
    )
    add_overrides(parser)


def add_overrides(parser: ArgumentParser) -> None:
    """Add `KEY=VALUE` and `--set KEY=VALUE`; `options.set` lists both in the order given."""
    parser.add_argument(
        "set",
        nargs="*",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="change one setting; table.key=value changes a key of a table",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="the same",
    )


def read_settings(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read the settings of a run file. Paths in it are relative to the current folder.

    Args:
        path: path of the run file.
        overrides: `key=value` or `table.key=value`, with values as in TOML; quotes around strings
            are optional.

    Raises:
        ConfigError: the file cannot be read, or an override is malformed.
    """
    settings = read_toml(path, error=ConfigError)
    for text in overrides:
        override(settings, text)
    return settings


def build(cls: type[T], settings: Mapping[str, Any], *, where: str) -> T:
    """Build an attrs class from settings; tables are converted to the attrs class of their field.

    Args:
        cls: attrs class to build.
        settings: values by name.
        where: name of the file, for messages.

    Raises:
        ConfigError: a key is unknown or missing, or a value is invalid.
    """
    init_fields = {
        attribute.alias: attribute for attribute in fields(cast(Any, cls)) if attribute.init
    }
    names = init_fields.keys() - NOT_IN_FILES
    for key in settings:
        if key not in names:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest_key(key, names)}")
    values = {key: _value_of(init_fields[key], value, where) for key, value in settings.items()}
    try:
        return cls(**values)
    except FAILURE as error:
        raise type(error)(f"{where}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{where}: {_missing(error)}") from error


def table_of(cls: type[T], name: str) -> Callable[[Any], T]:
    """Build an attrs converter that accepts an instance of `cls` or a table of its settings.

    Args:
        cls: attrs class of the field.
        name: name of the field, for messages.

    Returns:
        Converter; raises ConfigError for other types.
    """

    def converted(value: Any) -> T:
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return build(cls, value, where=name)
        names = ", ".join(attribute.alias for attribute in fields(cast(Any, cls)) if attribute.init)
        raise ConfigError(
            f"{name} must be {cls.__name__} or a table of {names}, got {short_repr(value)}"
        )

    return converted


def override(settings: dict[str, Any], text: str) -> None:
    """Apply an override, `key=value` or `table.key=value`, to `settings` in place.

    Raises:
        ConfigError: the override is malformed, or `table` is not a table.
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ConfigError(f"override {text!r} sets no value; write NAME=VALUE, such as seed=1")
    *tables, last = key.split(".")
    target: Any = settings
    for table in tables:
        target = target.setdefault(table, {})
        if not isinstance(target, dict):
            raise ConfigError(f"override {text!r}: {table!r} is not a table")
    target[last] = _parse(value)


def _value_of(attribute: "Attribute[Any]", value: Any, where: str) -> Any:
    nested = attribute.metadata.get("table")
    if nested is not None and not isinstance(value, nested):
        if not isinstance(value, dict):
            raise ConfigError(
                f"{where}: {attribute.alias} must be a table of settings, got {short_repr(value)}"
            )
        return build(nested, value, where=where)
    if nested is not None or attribute.converter is None:
        return value
    try:
        return cast(Any, attribute.converter)(value)
    except FAILURE as error:
        raise type(error)(f"{where}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{where}: {attribute.alias} is {short_repr(value)}; {error}") from error


def _missing(error: TypeError) -> str:
    text = str(error)
    names = text.rpartition(":")[2].strip() if "missing" in text else text
    return f"{names} is missing; add it" if "missing" in text else names


def _parse(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except RecursionError as error:
        raise ConfigError(f"override {text[:40]}...: nested too deeply to be read") from error
    except ValueError:  # not TOML, or too many digits for Python: a string
        return text
