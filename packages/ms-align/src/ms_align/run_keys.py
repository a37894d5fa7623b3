"""What a run file may hold, read from the source of the classes that take it, without torch.

A setting is an attrs field; its meaning is the docstring under it, which no class keeps when it is
made. So both are read from the source, and `--help` needs nothing that computes.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

__all__ = ["Key", "KeyGroup", "groups_of"]

PACKAGE = Path(__file__).parent
HIDDEN = {"on_event", "algorithm"}
"""Fields that no file can hold."""


@frozen(kw_only=True)
class Key:
    """One setting."""

    name: str
    meaning: str
    """One line."""
    default: Any = None
    required: bool = False
    table: str = ""
    """The class of its own settings, as `module:Class`, where it is a table."""


@frozen(kw_only=True)
class KeyGroup:
    """Settings of one class."""

    title: str
    keys: tuple[Key, ...]


def groups_of(place: str) -> list[KeyGroup]:
    """The settings of a class and of those that it inherits from, its own first.

    Args:
        place: `module:Class`, such as `trainers.ppo:PPOTrainer`.
    """
    groups: list[KeyGroup] = []
    taken: set[str] = set(HIDDEN)
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
    """A class, then those it inherits from, depth first, each once."""
    seen: set[str] = set()
    waiting = [place]
    while waiting:
        current = waiting.pop(0)
        module, _, name = current.partition(":")
        node = _classes(module).get(name)
        if node is None or current in seen:
            continue
        seen.add(current)
        yield module, node
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        waiting = [_place_of(module, base) for base in bases] + waiting


@cache
def _tree(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _classes(module: str) -> dict[str, ast.ClassDef]:
    if not PACKAGE.joinpath(*module.split(".")).with_suffix(".py").is_file():
        return {}
    return {node.name: node for node in _tree(module).body if isinstance(node, ast.ClassDef)}


def _place_of(module: str, name: str) -> str:
    """Where a class lies that a module names: in itself, or where it imports it from."""
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and any(each.name == name for each in node.names):
            return f"{(node.module or '').removeprefix('ms_align.')}:{name}"
    return f"{module}:{name}"


def _keys(module: str, node: ast.ClassDef) -> Iterator[Key]:
    for at, line in enumerate(node.body):
        if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
            continue
        behind = node.body[at + 1] if at + 1 < len(node.body) else None
        text = behind.value if isinstance(behind, ast.Expr) else None
        meaning = text.value if isinstance(text, ast.Constant) else ""
        default, required = _default(line.value)
        yield Key(
            name=line.target.id,
            meaning=" ".join(str(meaning).split()),
            default=default,
            required=required,
            table=_table(module, line.value),
        )


def _default(value: ast.expr | None) -> tuple[Any, bool]:
    """A field's default, and whether it must be given."""
    if value is None:
        return None, True
    if not isinstance(value, ast.Call):
        return ast.literal_eval(value), False
    given = {each.arg: each.value for each in value.keywords}
    if "factory" in given:
        return {}, False
    if "default" not in given:
        return None, True
    try:
        return ast.literal_eval(given["default"]), False
    except ValueError:  # the name of a constant
        return None, False


def _table(module: str, value: ast.expr | None) -> str:
    if not isinstance(value, ast.Call):
        return ""
    given = {each.arg: each.value for each in value.keywords}
    for name in ast.walk(given.get("metadata", ast.Constant(None))):
        if isinstance(name, ast.Name):
            return _place_of(module, name.id)
    return ""
