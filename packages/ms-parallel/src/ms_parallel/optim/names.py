"""Selection by name, or by a table of a name and settings."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ms_parallel.errors import ConfigError
from ms_parallel.settings import nearest, short_repr


def resolve_name(label: str, value: object, names: Iterable[str]) -> tuple[str, dict[str, Any]]:
    """Return a canonical name and its settings, from a name or from a table with a `name`.

    Names match regardless of case, hyphens, underscores and spaces.

    Raises:
        ConfigError: the value is neither, or the name is unknown.
    """
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ConfigError(
            f"{label} must be a name, or a table of name and settings such as"
            f" {{name = {next(iter(sorted(names)))!r}}}, got {short_repr(value)}"
        )
    name = {_plain(candidate): candidate for candidate in names}.get(_plain(table["name"]))
    if name is None:
        remedy = nearest(table["name"], names)
        raise ConfigError(f"{label} is {short_repr(table['name'])}; {remedy}")
    return name, {key: setting for key, setting in table.items() if key != "name"}


def check_known(label: str, settings: Mapping[str, Any], keys: Iterable[str] | None) -> None:
    """Check that all settings are among `keys`; None accepts any."""
    for key in settings:
        if keys is not None and key not in keys:
            remedy = nearest(str(key), keys) if keys else "it has no settings"
            raise ConfigError(f"{label} has unknown setting {short_repr(key)}; {remedy}")


def _plain(name: str) -> str:
    return re.sub("[-_ ]", "", name.lower())
