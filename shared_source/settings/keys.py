"""Keys of a run file, parsed from the source of the settings classes.

A setting is an attrs field, described by the docstring under it. Python discards such docstrings
at run time, so this module parses the source; `--help` then needs no heavy imports either.
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
    """Help text on one line."""
    default: Any = None
    required: bool = False
    example: Any = None
    """Sample value for the template, for a key without a default."""
    inner: "tuple[Key, ...]" = ()
    """Keys of a table."""
    kind: str = ""
    """Type annotation, as source text."""
    check: str = ""
    """Validator, as source text with constants replaced by their values."""


@frozen(kw_only=True)
class KeyGroup:
    """Settings of one class."""

    title: str
    keys: tuple[Key, ...]


def class_path(cls: type) -> str:
    """Return the `module:Class` of a class in this package, for `groups_of`."""
    return f"{cls.__module__.removeprefix(f'{PACKAGE.name}.')}:{cls.__name__}"


def groups_of(path: str, hidden: Collection[str] = ()) -> list[KeyGroup]:
    """Return the settings of a class and its base classes, one group per class, base classes last.

    Args:
        path: `module:Class` within this package, such as `trainers.ppo:PPOTrainer`.
        hidden: names of fields that are not keys of the run file.
    """
    groups: list[KeyGroup] = []
    seen: set[str] = set(hidden)
    lineage = [(node, list(_keys(module, node))) for module, node in _lineage(path)]
    meanings = {
        key.name: key.meaning for _, keys in reversed(lineage) for key in keys if key.meaning
    }
    for node, class_keys in lineage:
        keys = tuple(
            evolve(key, meaning=key.meaning or meanings.get(key.name, ""))
            for key in class_keys
            if key.name not in seen
        )
        seen |= {key.name for key in keys}
        if keys:
            title = (ast.get_docstring(node) or node.name).partition("\n")[0]
            groups.append(KeyGroup(title=title.rstrip("."), keys=keys))
    return groups


def _lineage(path: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield a class, then its base classes depth first, without duplicates."""
    seen: set[str] = set()
    pending = [path]
    while pending:
        current = pending.pop(0)
        module, _, name = current.partition(":")
        body = _body(module)
        node = next((n for n in body if isinstance(n, ast.ClassDef) and n.name == name), None)
        if node is None or current in seen:
            continue
        seen.add(current)
        yield module, node
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        pending = [_definition(module, base) for base in bases] + pending


@cache
def _body(module: str) -> list[ast.stmt]:
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []


def _definition(module: str, name: str) -> str:
    """Return the `module:name` that defines `name`: the module itself or one it imports from."""
    for node in _body(module):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return f"{(node.module or '').removeprefix(f'{PACKAGE.name}.')}:{name}"
    return f"{module}:{name}"


def _keys(module: str, node: ast.ClassDef) -> Iterator[Key]:
    for index, statement in enumerate(node.body):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if ast.unparse(statement.annotation).startswith("ClassVar"):
            continue
        successor = node.body[index + 1] if index + 1 < len(node.body) else None
        text = successor.value if isinstance(successor, ast.Expr) else None
        meaning = text.value if isinstance(text, ast.Constant) else ""
        arguments = {}
        if isinstance(statement.value, ast.Call):
            arguments = {keyword.arg: keyword.value for keyword in statement.value.keywords}
        value = (
            arguments.get("default") if isinstance(statement.value, ast.Call) else statement.value
        )
        table, example = _metadata(module, arguments.get("metadata"))
        yield Key(
            name=statement.target.id,
            meaning=in_toml(" ".join(str(meaning).split())),
            default={} if "factory" in arguments else _value(module, value),
            required=value is None and "factory" not in arguments,
            example=example,
            inner=tuple(key for group in groups_of(table) for key in group.keys) if table else (),
            kind=_kind(module, statement.annotation),
            check=_check(module, arguments.get("validator")),
        )


def in_toml(text: str) -> str:
    """Reword a field's docstring for TOML, which has no None and lowercase booleans."""
    for pattern, replacement in (
        (r"None (?=for\b|where\b)", "leave it out "),
        (r"None(?=:)", "left out"),
        (r"None\b", "leaving it out"),
    ):
        text = re.sub(rf"(?<=\. ){pattern}", replacement.capitalize(), text)
        text = re.sub(rf"\b{pattern}", replacement, text)
    return re.sub(r"\b(True|False)\b", lambda word: word[0].lower(), text)


def _kind(module: str, node: ast.expr) -> str:
    """Return the source of an annotation, with a type alias replaced by its definition."""
    if isinstance(node, ast.Name):
        source_module, _, name = _definition(module, node.id).partition(":")
        for statement in _body(source_module):
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
                return ast.unparse(statement.value)
    return ast.unparse(node)


def _check(module: str, node: ast.expr | None) -> str:
    """Return the source of a validator, with constants replaced by their values."""
    if not isinstance(node, ast.Call):
        return "" if node is None else ast.unparse(node)
    arguments = []
    for argument in node.args:
        starred = isinstance(argument, ast.Starred)
        value = _constant(module, argument.value if isinstance(argument, ast.Starred) else argument)
        values = value if starred and isinstance(value, list | tuple | dict | set) else (value,)
        arguments += [ast.unparse(argument)] if value is None else [repr(item) for item in values]
    for keyword in node.keywords:
        value = _constant(module, keyword.value)
        arguments.append(
            f"{keyword.arg}={ast.unparse(keyword.value) if value is None else repr(value)}"
        )
    return f"{ast.unparse(node.func)}({', '.join(arguments)})"


def _constant(module: str, node: ast.expr) -> Any:
    """Return the value of a literal or a constant of this package, or None; follow imports."""
    for _ in range(5):
        value = _value(module, node)
        if value is not None or not isinstance(node, ast.Name):
            return value
        source_module, _, name = _definition(module, node.id).partition(":")
        if source_module == module:
            return None
        module, node = source_module, ast.Name(id=name)
    return None


def _metadata(module: str, node: ast.expr | None) -> tuple[str, Any]:
    """Return the class of a field's table and the field's example, from its metadata."""
    table, example = "", None
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            name = key.value if isinstance(key, ast.Constant) else None
            if name == "table" and isinstance(value, ast.Name):
                table = _definition(module, value.id)
            if name == "example":
                example = _value(module, value)
    return table, example


def _value(module: str, node: ast.expr | None) -> Any:
    """Return the value of a literal, path or constant of the same module, or None."""
    if isinstance(node, ast.Call) and len(node.args) == 1:  # Path("runs"), get_args(Kind)
        node = node.args[0]
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
        node = node.slice
    if isinstance(node, ast.Name):
        for statement in _body(module):
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == node.id:
                return _value(module, statement.value)
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
