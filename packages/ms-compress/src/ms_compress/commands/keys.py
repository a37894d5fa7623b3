"""The keys of a run file, from the attrs class of its settings: for `--help` and for `init`.

What a key means is the text under its field, as the API pages have it.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from attrs import NOTHING, Factory, fields, frozen

from ms_compress.commands.command import Command

__all__ = ["Key", "help_of_keys", "keys_of", "template"]


@frozen(kw_only=True)
class Key:
    """One key of a run file."""

    name: str
    table: str
    """In which table it stands; empty for the first."""
    meaning: str
    """One line."""
    default: Any
    """NOTHING where it must be given."""
    example: Any
    """A value to write where there is no default."""
    needed: bool
    """Most runs give it, though it has a default."""


def keys_of(options: type, table: str = "") -> list[Key]:
    """All keys of a class of settings, those of its tables last."""
    meanings = dict(_meanings(options))
    own, tables = [], []
    for each in fields(cast(Any, options)):
        if nested := each.metadata.get("table"):
            tables += keys_of(nested, each.name)
            continue
        default = each.default
        if isinstance(default, Factory):  # type: ignore[arg-type]
            default = cast(Any, default).factory()
        key = Key(
            name=each.name,
            table=table,
            meaning=meanings.get(each.name, ""),
            default=default,
            example=each.metadata.get("example"),
            needed=each.metadata.get("needed", False),
        )
        own.append(key)
    own.sort(key=lambda key: (isinstance(key.example, dict), key.default is not NOTHING))
    return [*own, *tables]


def help_of_keys(options: type) -> str:
    """The keys with their defaults and meanings, a line each, by table."""
    lines, table = ["keys of RUN.toml:"], ""
    keys = keys_of(options)
    width = max(len(_with_default(key)) for key in keys)
    for key in keys:
        if key.table != table:
            table = key.table
            lines.append(f"  [{table}]")
        lines.append(f"  {_with_default(key):{width}}  {key.meaning}")
    return "\n".join(lines)


def template(command: Command) -> str:
    """A run file with every key, its default and what it means; paths are examples."""
    lines = [f"# Settings of `ms-compress {command.name} RUN.toml`: {command.help}."]
    table = ""
    for key in keys_of(command.options):
        if key.table != table:
            table = key.table
            lines += ["", f"[{table}]"]
        given = key.default if key.default not in (NOTHING, None) else key.example
        if isinstance(given, dict):
            lines += ["", f"# {key.meaning}", f"[{key.name}]"]
            lines += [f"{_toml(name)} = {_toml(value)}" for name, value in given.items()]
            continue
        value = _toml(given).replace("{command}", command.name)
        remark = "# " if key.default is None and not key.needed else ""
        lines += [f"# {key.meaning}", f"{remark}{key.name} = {value}"]
    return "\n".join(lines) + "\n"


def _with_default(key: Key) -> str:
    if key.default is NOTHING:
        return f"{key.name} (must be given)"
    return key.name if key.default is None else f"{key.name} = {_toml(key.default)}"


def _toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, int | float):
        return repr(value)
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _meanings(options: type) -> Iterator[tuple[str, str]]:
    """The first sentence of the text under each field, the classes that it extends included."""
    for kind in reversed(options.__mro__):
        if kind is object or not Path(inspect.getfile(kind)).is_file():
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        body = cast(ast.ClassDef, definition).body
        for one, after in pairwise(body):
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(one, ast.AnnAssign) and isinstance(text, ast.Constant):
                first, dot, _ = " ".join(str(text.value).split()).partition(". ")
                yield ast.unparse(one.target), first + "." if dot else first
