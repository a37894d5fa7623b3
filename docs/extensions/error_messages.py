"""Collects the messages of a package's errors from its source, with what each tells to do.

A message is written as what is wrong, then, behind a semicolon, the remedy. Both are read where
the error is raised, so that the page can't fall behind the code. What to do about a message that
tells only what is wrong stands in `remedies.toml`.
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
"""What an argument that does not fit is told with."""


class Message(NamedTuple):
    """One message that a package can end with."""

    room: str
    """The folder or module below the package, such as `streams`."""
    error: str
    """The class of the error."""
    wrong: str
    """What is wrong; `…` stands for a value."""
    remedy: str
    """What to do; empty where the message tells only what is wrong."""


@cache
def messages_of(package: str) -> tuple[Message, ...]:
    """Collect the messages of a package, such as `ms-data`, by room and wording, each once."""
    module = package.replace("-", "_")
    source = ROOT / "packages" / package / "src" / module
    errors = error_classes(source / "errors.py")
    found = set()
    for path in sorted(source.rglob("*.py")):
        room = path.relative_to(source).parts[0].removesuffix(".py")
        for error, text in raised(ast.parse(path.read_text(encoding="utf-8")), errors):
            wrong, remedy = parts_of(text)
            if len(WORDS.findall(wrong)) > 1:
                found.add(Message(room, error, wrong, remedy))
    return tuple(sorted(found))


@cache
def remedies() -> dict[str, list[str]]:
    """What to do about messages that do not say it: in English and in Chinese, by their words."""
    return tomllib.loads(Path(__file__).with_name("remedies.toml").read_text(encoding="utf-8"))


def error_classes(path: Path) -> dict[str, str]:
    """Read the names of a package's errors, each with the first line of its docstring."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {
        node.name: (ast.get_docstring(node) or "").partition("\n")[0]
        for node in body
        if isinstance(node, ast.ClassDef)
    }


def raised(tree: ast.AST, errors: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Give the class and text of every error that is made with a text."""
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            continue
        texts: dict[str, str] = {}
        for node in own_nodes(scope):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                texts[node.targets[0].id] = text_of(node.value, texts)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                name = node.func.id
                if name in errors and node.args:
                    yield name, whole_text(node, texts)


def whole_text(call: ast.Call, texts: dict[str, str]) -> str:
    """Give an error's text; ms-kernels' errors join theirs of four parts."""
    parts = [text_of(part, texts) for part in call.args]
    if len(parts) != len(OPERATORS_PARTS):
        return parts[0]
    operator, argument, got, fits = parts
    return f"{operator}: {argument} is {got}; it must be {fits}"


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Give the nodes of a function or module in order, but not of functions within it."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield child
        yield from own_nodes(child)


def text_of(node: ast.expr, texts: dict[str, str]) -> str:
    """Give an expression's text; a name stands for the text it was given just above."""
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
    """Split a message into what is wrong and what to do."""
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(f"^{PLACEHOLDER}: ", "", text)
    wrong, _, remedy = re.sub(r": (?=pip install )", "; ", text).partition("; ")
    return wrong, "" if WORDS.search(remedy) is None else remedy
