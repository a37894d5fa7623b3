"""Collect the keys of every run file: name, type, default, allowed values, meaning.

They are read like `--help` and `init` read them, so the pages cannot fall behind the commands.
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
"""Type in a run file for each type in the source."""
CHECKED = {
    "flag": "true or false",
    "integer": "whole number",
    "number": "number",
    "one_of": "text",
    "text": "text",
    "valid_path": "text",
    "numbers": "table",
}
"""Type in a run file by validator, for fields whose Python type is less specific."""

CONVERTED_KEYS = {
    "devices": ("table",),
    "held_out": ("text",),
    "layout": ("table",),
    "teacher_layout": ("table",),
    "teacher_model": ("text", "table"),
    "pattern": ("text", "number"),
    "scheme": ("text",),
    "stop_token_ids": ("whole number", "list"),
}
"""Types in a run file for keys whose Python type and validator say too little."""


class Row(NamedTuple):
    """One key of a run file."""

    name: str
    """Name, with its table as a prefix."""
    types: tuple[str, ...]
    """Types that a run file can have."""
    default: str | None
    """Default in TOML; empty if the key is unset by default, None for a required key."""
    accepted: str
    """Limits or choices; empty if the types say everything."""
    meaning: str


class Section(NamedTuple):
    """Keys under one heading."""

    title: str
    rows: tuple[Row, ...]


def commands() -> dict[str, Callable[[], list[Section]]]:
    """Commands that take a run file, by their name on a page.

    The packages do not have to be installed. mkdocs removes paths that a hook adds to `sys.path`
    when it is loaded, so they are added here.
    """
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    sys.path[:0] = [source for source in sources if source not in sys.path]
    from ms_align.commands.command import COMMANDS as ALIGN
    from ms_compress.commands import COMMANDS as COMPRESS
    from ms_parallel.run_template import key_groups
    from ms_parallel.settings.keys import groups_of

    readers: dict[str, Any] = {"ms-parallel train": key_groups}
    readers |= {f"ms-align {command.name}": command.groups for command in ALIGN}
    readers |= {f"ms-compress {command.name}": command.groups for command in COMPRESS}
    readers["ms-parallel plan"] = lambda: groups_of("planner.cluster.cluster:Cluster")
    sections = {name: _reader(groups) for name, groups in readers.items()}
    return sections | {"ms-data clean": cleaning_rules}


def _reader(groups: Callable[[], list[Any]]) -> Callable[[], list[Section]]:
    return lambda: [
        Section(group.title, tuple(row for key in group.keys for row in rows_of(key)))
        for group in groups()
    ]


def cleaning_rules() -> list[Section]:
    """Sections of a file of cleaning rules, one per rule."""
    from ms_data.cleaning.rules import RULES
    from ms_data.settings.keys import class_path, groups_of

    sections = []
    for name, rule in RULES.items():
        groups = groups_of(class_path(rule), hidden=("name", "shown"))
        rows = tuple(row for group in groups for key in group.keys for row in rows_of(key))
        sections.append(Section(f"[{name}] {groups[0].title}", rows))
    return sections


def rows_of(key: Any) -> list[Row]:
    """Rows of a key and of the keys in its table."""
    default = None if key.required else toml(key.default)
    row = Row(key.name, types_of(key), default, accepted_by(key), key.meaning)
    inner = [row for inner_key in key.inner for row in rows_of(inner_key)]
    if not inner:
        return [row]
    prefixed = [inner_row._replace(name=f"{key.name}.{inner_row.name}") for inner_row in inner]
    default = "" if "None" in key.kind else "{}"
    return [row._replace(types=("table",), default=default), *prefixed]


def types_of(key: Any) -> tuple[str, ...]:
    """Types that a run file can have for a key."""
    words = re.findall(r"\w+", re.sub(r"\[.*\]", "", key.kind))
    types = list(dict.fromkeys(TYPES[word] for word in words if word in TYPES))
    if "Literal" in key.kind and "text" not in types:
        types.append("text")
    checked = CHECKED.get(key.check.partition("(")[0]) or TYPES.get(type(key.default).__name__)
    return tuple(types) or CONVERTED_KEYS.get(key.name) or ((checked,) if checked else ())


def accepted_by(key: Any) -> str:
    """Values that a validator accepts, in words."""
    name, _, _ = key.check.partition("(")
    if name == "one_of" or (not key.check and key.kind.startswith("Literal")):
        node = ast.parse(key.check or key.kind, mode="eval").body
        values = node.args if isinstance(node, ast.Call) else node.slice.elts  # type: ignore[attr-defined]
        return ", ".join(f"`{ast.literal_eval(value)}`" for value in values)
    if name not in ("integer", "number"):
        return ""
    call = ast.parse(key.check, mode="eval").body
    arguments = {word.arg: ast.unparse(word.value) for word in call.keywords}  # type: ignore[attr-defined]
    minimum = arguments.get("minimum", "1" if name == "integer" else "0")
    words = [] if "inf" in minimum else [f"from {minimum}"]
    if re.fullmatch(r"[\d.e+-]+", arguments.get("maximum", "")):
        words.append(f"to {arguments['maximum']}")
    if "below" in arguments:
        words.append(f"less than {arguments['below']}")
    return ", ".join(words).replace(", to", " to")


def toml(value: Any) -> str:
    """Default value in TOML; empty for None."""
    if value is None:
        return ""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    return "{}" if isinstance(value, dict) else repr(value)
