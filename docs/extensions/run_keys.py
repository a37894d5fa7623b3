"""Collects the keys of every run file: name, type, default, what is accepted, what it means.

They are read as `--help` and `init` read them, so the pages can't fall behind the commands.
"""

import ast
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]

TYPES = {
    "str": "text",
    "Path": "text",
    "int": "whole number",
    "float": "number",
    "bool": "true or false",
    "dict": "table",
    "Mapping": "table",
    "tuple": "list",
    "list": "list",
    "Sequence": "list",
}
"""What a run file holds for each type of the source that it can hold."""
CHECKED = {
    "flag": "true or false",
    "whole": "whole number",
    "number": "number",
    "one_of": "text",
    "text": "text",
    "a_path": "text",
    "numbers": "table",
}
"""The same by what checks a value, for fields whose class in Python says less."""

READ_OTHERWISE = {
    "devices": ("table",),
    "held_out": ("text",),
    "layout": ("table",),
    "pattern": ("text", "number"),
    "scheme": ("text",),
    "stop_tokens": ("whole number", "list"),
}
"""What a file can hold for keys that a converter reads, whose type in Python says nothing."""


class Row(NamedTuple):
    """One key of a run file."""

    name: str
    """With its table in front, where it is in one."""
    types: tuple[str, ...]
    """What a file can hold for it."""
    default: str | None
    """As TOML writes it; empty if nothing is given by default, None for a key that is needed."""
    accepted: str
    """Limits, or the words to choose from; empty for no more than the types say."""
    meaning: str


class Section(NamedTuple):
    """Keys under one heading."""

    title: str
    rows: tuple[Row, ...]


def commands() -> dict[str, Callable[[], list[Section]]]:
    """Every command that takes a file of settings, by the name that a page gives it.

    The packages need not be installed. mkdocs takes back what a hook adds to the path of imports
    when it is loaded, so they are put there once they are asked for.
    """
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    sys.path[:0] = [source for source in sources if source not in sys.path]
    from ms_align.commands.command import COMMANDS as ALIGN
    from ms_compress.commands import COMMANDS as COMPRESS
    from ms_parallel.run_template import key_groups
    from ms_parallel.settings.keys import groups_of

    found: dict[str, Any] = {"ms-parallel train": key_groups}
    found |= {f"ms-align {each.name}": each.groups for each in ALIGN}
    found |= {f"ms-compress {each.name}": each.groups for each in COMPRESS}
    found["ms-parallel plan"] = lambda: groups_of("planner.cluster.cluster:Cluster")
    readers = {name: _reader(groups) for name, groups in found.items()}
    return readers | {"ms-data clean": rules_of_cleaning}


def _reader(groups: Callable[[], list[Any]]) -> Callable[[], list[Section]]:
    return lambda: [
        Section(group.title, tuple(row for key in group.keys for row in rows_of(key)))
        for group in groups()
    ]


def rules_of_cleaning() -> list[Section]:
    """The tables of a file of rules, a section each."""
    from ms_data.cleaning.rules import RULES
    from ms_data.settings.keys import groups_of, place_of

    sections = []
    for name, rule in RULES.items():
        groups = groups_of(place_of(rule), hidden=("name", "shown"))
        rows = tuple(row for group in groups for key in group.keys for row in rows_of(key))
        sections.append(Section(f"[{name}] {groups[0].title}", rows))
    return sections


def rows_of(key: Any) -> list[Row]:
    """A key, and those of its table."""
    default = None if key.required else toml(key.default)
    row = Row(key.name, types_of(key), default, accepted_by(key), key.meaning)
    inner = [row for each in key.inner for row in rows_of(each)]
    if not inner:
        return [row]
    named = [each._replace(name=f"{key.name}.{each.name}") for each in inner]
    given = "" if "None" in key.kind else "{}"
    return [row._replace(types=("table",), default=given), *named]


def types_of(key: Any) -> tuple[str, ...]:
    """What a run file can hold for a key."""
    words = re.findall(r"\w+", re.sub(r"\[.*\]", "", key.kind))
    found = list(dict.fromkeys(TYPES[word] for word in words if word in TYPES))
    if "Literal" in key.kind and "text" not in found:
        found.append("text")
    named = CHECKED.get(key.check.partition("(")[0]) or TYPES.get(type(key.default).__name__)
    return tuple(found) or ((named,) if named else READ_OTHERWISE.get(key.name, ()))


def accepted_by(key: Any) -> str:
    """What a validator accepts, in words."""
    name, _, _ = key.check.partition("(")
    if name == "one_of" or (not key.check and key.kind.startswith("Literal")):
        node = ast.parse(key.check or key.kind, mode="eval").body
        values = node.args if isinstance(node, ast.Call) else node.slice.elts  # type: ignore[attr-defined]
        return ", ".join(f"`{ast.literal_eval(each)}`" for each in values)
    if name not in ("whole", "number"):
        return ""
    call = ast.parse(key.check, mode="eval").body
    given = {each.arg: ast.unparse(each.value) for each in call.keywords}  # type: ignore[attr-defined]
    least = given.get("least", "1" if name == "whole" else "0")
    words = [] if "inf" in least else [f"from {least}"]
    if re.fullmatch(r"[\d.e+-]+", given.get("most", "")):
        words.append(f"to {given['most']}")
    if "below" in given:
        words.append(f"less than {given['below']}")
    return ", ".join(words).replace(", to", " to")


def toml(value: Any) -> str:
    """A default as TOML writes it; nothing for one that is not given."""
    if value is None:
        return ""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    return "{}" if isinstance(value, dict) else repr(value)
