"""A command's keys as people read them: in `--help`, and as a run file to begin with."""

import textwrap
from collections.abc import Iterable
from typing import Any

from attrs import evolve

from ms_align.commands.command import Command
from ms_align.run_keys import Key, KeyGroup, groups_of

__all__ = ["help_of", "keys_of", "template_of"]

WIDTH = 100


def keys_of(command: Command) -> list[KeyGroup]:
    """All keys of a command's run files: those that must be given first, then by class."""
    groups = [
        evolve(group, keys=tuple(_called(command, key) for key in group.keys))
        for group in groups_of(command.settings)
    ]
    keys = [*(key for group in groups for key in group.keys), *command.more]
    needed = tuple(key for key in keys if key.required)
    others = KeyGroup(title="Data", keys=tuple(key for key in command.more if not key.required))
    rest = [evolve(g, keys=tuple(k for k in g.keys if not k.required)) for g in groups]
    return [KeyGroup(title="Needed", keys=needed), *(g for g in (others, *rest) if g.keys)]


def help_of(command: Command) -> str:
    """The keys of a run file, grouped, a line each, and an example."""
    lines = ["keys of RUN.toml:"]
    for group in keys_of(command):
        lines += ["", f"  {group.title}"]
        for key in group.keys:
            value = "" if key.required else f" = {_toml(key.default)}"
            lines += _wrapped(f"    {key.name}{value}  ", key.meaning)
            for inner in _table_keys(key):
                name = f"      {key.name}.{inner.name} = {_toml(inner.default)}  "
                lines += _wrapped(name, inner.meaning)
    return "\n".join([*lines, "", f"example: {command.example}"])


def template_of(command: Command) -> str:
    """A run file with every key: what must be given with a path to fill in, the rest as it is."""
    lines = [f"# ms-align {command.name} RUN.toml: {command.help}."]
    lines += ["# A line that begins with # holds what is taken without it."]
    groups = keys_of(command)
    for group in groups:
        lines += ["", f"# {group.title}"]
        for key in group.keys:
            if key.table:
                continue
            given = command.begins_with.get(key.name)
            mark = "" if given is not None else "# "
            lines += _wrapped("# ", key.meaning)
            lines.append(f"{mark}{key.name} = {_toml(key.default if given is None else given)}")
    for key in (key for group in groups for key in group.keys if key.table):
        lines += ["", *_wrapped("# ", key.meaning), f"# [{key.name}]"]
        for inner in _table_keys(key):
            lines += _wrapped("# ", inner.meaning)
            lines.append(f"# {inner.name} = {_toml(inner.default)}")
    return "\n".join(lines) + "\n"


def _called(command: Command, key: Key) -> Key:
    return evolve(key, name=command.called.get(key.name, key.name))


def _table_keys(key: Key) -> Iterable[Key]:
    return [one for group in groups_of(key.table) for one in group.keys] if key.table else []


def _wrapped(head: str, meaning: str) -> list[str]:
    behind = "# " if head == "# " else " " * (len(head) - len(head.lstrip()) + 4)
    return textwrap.wrap(head + meaning, WIDTH, subsequent_indent=behind)


def _toml(value: Any) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(one) for one in value)}]"
    return "{}" if isinstance(value, dict) else repr(value)
