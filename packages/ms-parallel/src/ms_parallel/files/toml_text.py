"""Writes tables as TOML."""

import json
from collections.abc import Mapping
from typing import Any


def toml_text(table: Mapping[str, Any], *, title: str = "") -> str:
    """Format a table as TOML; its values are strings, numbers, booleans, lists and tables.

    Args:
        table: entries with the value None are omitted.
        title: comment on the first line.
    """
    lines = [f"# {' '.join(title.split())}"] if title else []
    _write(table, "", lines)
    return "\n".join(lines) + "\n"


def _write(table: Mapping[str, Any], name: str, lines: list[str]) -> None:
    present = {key: value for key, value in table.items() if value is not None}
    plain = {key: value for key, value in present.items() if not isinstance(value, Mapping)}
    if name and (plain or not present):
        lines += ["", f"[{name}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key in (key for key in present if key not in plain):
        _write(present[key], f"{name}.{_key(key)}" if name else _key(key), lines)


def _key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
