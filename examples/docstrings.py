"""Build an instruction dataset from Python's standard library: function to docstring and back.

Writes one file per task, so that the tasks can be mixed or scheduled as two sources. Deterministic:
the same Python version gives the same bytes, in the order of files and lines.

Run it: python examples/docstrings.py OUT
"""

import argparse
import ast
import io
import json
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
MAX_CHARACTERS = 4000
MIN_CHARACTERS = 20


def functions(library: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, source without docstring, and docstring of each function that has one."""
    for path in sorted(library.rglob("*.py")):
        if EXCLUDED.intersection(path.relative_to(library).parts):
            continue
        try:
            with tokenize.open(path) as file, warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                text = io.StringIO(file.read()).getvalue()
                tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring and len(node.body) > 1:
                    node.body = node.body[1:]
                    yield node.name, ast.unparse(node), docstring


def write_instructions(folder: Path, *, library: Path | None = None) -> dict[str, int]:
    """Write `describe.jsonl` (function to docstring) and `implement.jsonl` (back) into `folder`.

    Args:
        folder: output folder; created if missing.
        library: Python sources; default: the standard library of this Python.

    Returns:
        Number of rows per task.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"describe": 0, "implement": 0}
    seen: set[tuple[str, str]] = set()
    with (
        (folder / "describe.jsonl").open("w", encoding="utf-8") as describe,
        (folder / "implement.jsonl").open("w", encoding="utf-8") as implement,
    ):
        for name, source, docstring in functions(library or Path(sysconfig.get_path("stdlib"))):
            short = len(docstring) >= MIN_CHARACTERS and len(source) <= MAX_CHARACTERS
            if (source, docstring) in seen or not short or len(docstring) > MAX_CHARACTERS:
                continue
            seen.add((source, docstring))
            describe.write(_row(f"Write the docstring of this function.\n\n{source}", docstring))
            question = f"Write the Python function `{name}` that this describes.\n\n{docstring}"
            implement.write(_row(question, source))
            counts["describe"] += 1
            counts["implement"] += 1
    return counts


def _row(question: str, answer: str) -> str:
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return json.dumps({"messages": messages}, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="output folder")
    for task, rows in write_instructions(parser.parse_args().out).items():
        print(f"{task}: {rows:,} rows")
