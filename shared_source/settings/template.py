"""Formats the keys of a run file for `--help` and for the template written by `init`."""

import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files.durable import write_file
from .keys import Key, KeyGroup

WIDTH = 100


def help_text(groups: Sequence[KeyGroup]) -> str:
    """Format the keys of a run file by group, each with its default and help text."""
    lines = ["keys of RUN.toml; KEY=VALUE changes one:"]
    for group in groups:
        lines += ["", f"  {group.title}"]
        for key in group.keys:
            value = "" if key.required or key.inner else f" = {_toml(key.default)}"
            lines += _wrapped(f"    {key.name}{value}  ", key.meaning)
            for inner in key.inner:
                name = f"      {key.name}.{inner.name} = {_toml(inner.default)}  "
                lines += _wrapped(name, inner.meaning)
    return "\n".join(lines)


def template_text(title: str, groups: Sequence[KeyGroup], initial: Mapping[str, Any]) -> str:
    """Format a run file with every key; keys that are not in `initial` are commented out.

    Args:
        title: first line of the file.
        groups: keys of the command.
        initial: initial values by key; a mapping becomes a table.
    """
    lines = [f"# {title}", "# Commented-out keys show their defaults."]
    tables: list[str] = []
    for group in groups:
        plain = [key for key in group.keys if not _is_table(key, initial)]
        lines += ["", f"# {group.title}"] if plain else []
        for key in plain:
            value = initial.get(key.name)
            lines += _wrapped("# ", key.meaning)
            lines.append(_line(key.name, key.default if value is None else value, value is None))
        for key in group.keys:
            if _is_table(key, initial):
                tables += _table(key, initial.get(key.name, {}))
    return "\n".join([*lines, *tables]) + "\n"


def write_template(text: str, out: Path | None) -> bool:
    """Write a template to a new file or to standard output; return whether it went to a file.

    Raises:
        ConfigError: the file already exists.
        WriteError: it cannot be written.
    """
    if out is None:
        sys.stdout.write(text)
        return False
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists; delete it or use another name")
    write_file(out, text.encode())
    return True


def _is_table(key: Key, initial: Mapping[str, Any]) -> bool:
    return bool(key.inner) or isinstance(initial.get(key.name), Mapping)


def _table(key: Key, initial: Mapping[str, Any]) -> list[str]:
    lines = ["", *_wrapped("# ", key.meaning), f"[{key.name}]" if initial else f"# [{key.name}]"]
    for inner in key.inner:
        value = initial.get(inner.name)
        lines += _wrapped("# ", inner.meaning)
        lines.append(_line(inner.name, inner.default if value is None else value, value is None))
    names = {inner.name for inner in key.inner}
    return lines + [
        _line(name, value, False) for name, value in initial.items() if name not in names
    ]


def _line(name: str, value: Any, commented: bool) -> str:
    name = name if name.isidentifier() else json.dumps(name)
    return f"{'# ' if commented else ''}{name} = {_toml(value)}"


def _wrapped(head: str, meaning: str) -> list[str]:
    indent = "# " if head == "# " else " " * (len(head) - len(head.lstrip()) + 4)
    return textwrap.wrap(head + meaning, WIDTH, subsequent_indent=indent)


def _toml(value: Any) -> str:
    """Format a value as TOML; None, which TOML lacks, as `not given`."""
    if value is None:
        return "not given"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return "{}" if isinstance(value, dict) else repr(value)
