"""The keys of a run file, read from the source of the classes that take it.

A setting is an attrs field, and its meaning is the text under it, which no class keeps when it is
made. Both are read from the source, so that `--help` imports nothing that computes.
"""

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

PACKAGE = Path(__file__).parents[1]


@frozen(kw_only=True)
class Key:
    """One setting."""

    name: str
    meaning: str
    """As one line."""
    default: Any = None
    required: bool = False
    example: Any = None
    """A value to begin with, where there is no default."""
    inner: "tuple[Key, ...]" = ()
    """The settings of a table."""
    kind: str = ""
    """Its type, as the source writes it."""
    check: str = ""
    """What checks a value, as the source writes it, constants filled in."""


@frozen(kw_only=True)
class KeyGroup:
    """Settings of one class."""

    title: str
    keys: tuple[Key, ...]


def place_of(kind: type) -> str:
    """Return the place of a class of this package, as `groups_of` takes it."""
    return f"{kind.__module__.removeprefix(f'{PACKAGE.name}.')}:{kind.__name__}"


def groups_of(place: str, hidden: Collection[str] = ()) -> list[KeyGroup]:
    """Read the settings of a class and of those that it inherits from, its own first.

    Args:
        place: `module:Class` within this package, such as `trainers.ppo:PPOTrainer`.
        hidden: names of fields that no file can hold.
    """
    groups: list[KeyGroup] = []
    taken: set[str] = set(hidden)
    lineage = [(node, list(_keys(module, node))) for module, node in _lineage(place)]
    meanings = {
        key.name: key.meaning for _, keys in reversed(lineage) for key in keys if key.meaning
    }
    for node, found in lineage:
        keys = tuple(
            evolve(key, meaning=key.meaning or meanings.get(key.name, ""))
            for key in found
            if key.name not in taken
        )
        taken |= {key.name for key in keys}
        if keys:
            title = (ast.get_docstring(node) or node.name).partition("\n")[0]
            groups.append(KeyGroup(title=title.rstrip("."), keys=keys))
    return groups


def _lineage(place: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield a class, then those it inherits from, depth first, each once."""
    seen: set[str] = set()
    waiting = [place]
    while waiting:
        current = waiting.pop(0)
        module, _, name = current.partition(":")
        body = _body(module)
        node = next((n for n in body if isinstance(n, ast.ClassDef) and n.name == name), None)
        if node is None or current in seen:
            continue
        seen.add(current)
        yield module, node
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        waiting = [_named(module, base) for base in bases] + waiting


@cache
def _body(module: str) -> list[ast.stmt]:
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []


def _named(module: str, name: str) -> str:
    """Find the place of a class that a module names: itself, or where it imports the class from."""
    for node in _body(module):
        if isinstance(node, ast.ImportFrom) and any(each.name == name for each in node.names):
            return f"{(node.module or '').removeprefix(f'{PACKAGE.name}.')}:{name}"
    return f"{module}:{name}"


def _keys(module: str, node: ast.ClassDef) -> Iterator[Key]:
    for at, line in enumerate(node.body):
        if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
            continue
        if ast.unparse(line.annotation).startswith("ClassVar"):
            continue
        behind = node.body[at + 1] if at + 1 < len(node.body) else None
        text = behind.value if isinstance(behind, ast.Expr) else None
        meaning = text.value if isinstance(text, ast.Constant) else ""
        given = {}
        if isinstance(line.value, ast.Call):
            given = {each.arg: each.value for each in line.value.keywords}
        value = given.get("default") if isinstance(line.value, ast.Call) else line.value
        table, example = _metadata(module, given.get("metadata"))
        yield Key(
            name=line.target.id,
            meaning=in_toml(" ".join(str(meaning).split())),
            default={} if "factory" in given else _value(module, value),
            required=value is None and "factory" not in given,
            example=example,
            inner=tuple(key for group in groups_of(table) for key in group.keys) if table else (),
            kind=_kind(module, line.annotation),
            check=_check(module, given.get("validator")),
        )


def in_toml(text: str) -> str:
    """Put a field's docstring into the words of a run file, in which no key has the value None."""
    for words, instead in (
        (r"None (?=for\b|where\b)", "leave it out "),
        (r"None(?=:)", "left out"),
        (r"None\b", "leaving it out"),
    ):
        text = re.sub(rf"(?<=\. ){words}", instead.capitalize(), text)
        text = re.sub(rf"\b{words}", instead, text)
    return re.sub(r"\b(True|False)\b", lambda word: word[0].lower(), text)


def _kind(module: str, node: ast.expr) -> str:
    """Write an annotation's source; a type with a name of its own gives way to what it names."""
    if isinstance(node, ast.Name):
        found, _, name = _named(module, node.id).partition(":")
        for line in _body(found):
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == name:
                return ast.unparse(line.value)
    return ast.unparse(node)


def _check(module: str, node: ast.expr | None) -> str:
    """Write a validator's source; names of constants give way to their values."""
    if not isinstance(node, ast.Call):
        return "" if node is None else ast.unparse(node)
    words = []
    for each in node.args:
        star = isinstance(each, ast.Starred)
        value = _constant(module, each.value if isinstance(each, ast.Starred) else each)
        names = value if star and isinstance(value, list | tuple | dict | set) else (value,)
        words += [ast.unparse(each)] if value is None else [repr(one) for one in names]
    for given in node.keywords:
        value = _constant(module, given.value)
        words.append(f"{given.arg}={ast.unparse(given.value) if value is None else repr(value)}")
    return f"{ast.unparse(node.func)}({', '.join(words)})"


def _constant(module: str, node: ast.expr) -> Any:
    """Find the value of a literal or of this package's constant, imported or not; else None."""
    for _ in range(5):
        value = _value(module, node)
        if value is not None or not isinstance(node, ast.Name):
            return value
        found, _, name = _named(module, node.id).partition(":")
        if found == module:
            return None
        module, node = found, ast.Name(id=name)
    return None


def _metadata(module: str, node: ast.expr | None) -> tuple[str, Any]:
    """Find the class of a field's table, and its example."""
    table, example = "", None
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            name = key.value if isinstance(key, ast.Constant) else None
            if name == "table" and isinstance(value, ast.Name):
                table = _named(module, value.id)
            if name == "example":
                example = _value(module, value)
    return table, example


def _value(module: str, node: ast.expr | None) -> Any:
    """Find what an expression stands for: a literal, path or constant of its module; else None."""
    if isinstance(node, ast.Call) and len(node.args) == 1:  # Path("runs"), get_args(Kind)
        node = node.args[0]
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
        node = node.slice
    if isinstance(node, ast.Name):
        for line in _body(module):
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == node.id:
                return _value(module, line.value)
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
