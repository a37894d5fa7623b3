"""Collect the error messages of a package and their remedies from its source.

A message states the problem and, after a semicolon, the remedy. Both are read where the error is
raised, so the page cannot fall behind the code. `remedies.toml` has the remedies of messages that
state only the problem.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
WORDS = re.compile(r"[A-Za-z]{2,}")
PLACEHOLDER = "…"
OPERATORS_PARTS = ("operator", "argument", "got", "fits")
"""Positional arguments of ms-kernels' argument errors."""


class Message(NamedTuple):
    """An error message of a package."""

    room: str
    """Subpackage or module, such as `streams`."""
    error: str
    """Class of the error."""
    wrong: str
    """Problem; `…` replaces a value."""
    remedy: str
    """Remedy; empty if the message states only the problem."""


@cache
def messages_of(package: str) -> tuple[Message, ...]:
    """Distinct messages of a package, such as `ms-data`, sorted by subpackage and wording."""
    module = package.replace("-", "_")
    source = ROOT / "packages" / package / "src" / module
    errors = error_classes(source / "errors.py")
    messages = set()
    for path in sorted(source.rglob("*.py")):
        room = path.relative_to(source).parts[0].removesuffix(".py")
        for error, text in raised(ast.parse(path.read_text(encoding="utf-8")), errors):
            wrong, remedy = parts_of(text)
            if len(WORDS.findall(wrong)) > 1:
                messages.add(Message(room, error, wrong, remedy))
    return tuple(sorted(messages))


@cache
def remedies() -> dict[str, list[str]]:
    """English and Chinese remedies of messages without one, by message."""
    return tomllib.loads(Path(__file__).with_name("remedies.toml").read_text(encoding="utf-8"))


def error_classes(path: Path) -> dict[str, str]:
    """Names of a package's error classes with the first lines of their docstrings."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {
        node.name: (ast.get_docstring(node) or "").partition("\n")[0]
        for node in body
        if isinstance(node, ast.ClassDef)
    }


def raised(tree: ast.AST, errors: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield class and text of every error that is created with a text."""
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            continue
        texts: dict[str, str] = {}
        for node in direct_nodes(scope):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                texts[node.targets[0].id] = text_of(node.value, texts)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                name = node.func.id
                if name in errors and node.args:
                    yield name, error_text(node, texts)


def error_text(call: ast.Call, texts: dict[str, str]) -> str:
    """Text of an error; ms-kernels' argument errors have four parts."""
    parts = [text_of(part, texts) for part in call.args]
    if len(parts) != len(OPERATORS_PARTS):
        return parts[0]
    operator, argument, got, fits = parts
    return f"{operator}: {argument} is {got}; it must be {fits}"


def direct_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or module in order, without nested functions."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield child
        yield from direct_nodes(child)


def text_of(node: ast.expr, texts: dict[str, str]) -> str:
    """Text of an expression; a name is replaced by the text assigned to it before."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, texts) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, texts) if isinstance(node.value, ast.Name) else PLACEHOLDER
    if isinstance(node, ast.Name):
        return texts.get(node.id) or PLACEHOLDER
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, texts) + text_of(node.right, texts)
    return PLACEHOLDER


def parts_of(text: str) -> tuple[str, str]:
    """Split a message into problem and remedy."""
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(f"^{PLACEHOLDER}: ", "", text)
    wrong, _, remedy = re.sub(r": (?=pip install )", "; ", text).partition("; ")
    return wrong, "" if WORDS.search(remedy) is None else remedy
