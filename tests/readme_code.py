"""A pytest plugin that executes the code of Markdown pages, each page in its own folder.

Blocks run in order in an initially empty folder: `python` and `py` in one namespace; `bash` and
`sh` in a shell that stops at the first failure; in `console`, the lines after `$ `, whose output is
compared with the lines below (`...` matches anything). A `toml`, `jinja` or `jsonl` block whose
first line is a comment with a file name is written to that file.

A block that cannot run has a comment with the reason before it: `<!-- not run: REASON -->`.
tests/test_documented_commands.py still parses its commands.

If `README_FOLDERS` is set, the folders are kept in it, so that a page can be run again.
"""

import fnmatch
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sybil import Document, Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

ROOT = Path(__file__).resolve().parents[1]
OURS = sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())
NAME = re.compile(r"\A(?:# |\{# ?|// )([\w./-]+\.\w+)")
NOT_RUN = re.compile(r"<!-- not run: (\S[^>]*) -->\s*\Z")
TIMEOUT_S = 300


class Page(Document):
    """A page with its path in the namespace."""

    def __init__(self, text: str, path: str) -> None:
        super().__init__(text, path)
        self.namespace["_page_path"] = path


def enter_folder(namespace: dict[str, Any]) -> None:
    """Change to the page's own folder."""
    namespace["_before"] = os.getcwd()
    cached = os.environ.get("README_FOLDERS")
    if cached:
        page = Path(namespace["_page_path"]).relative_to(ROOT)
        folder = Path(cached) / "-".join(page.parts)
        folder.mkdir(parents=True, exist_ok=True)
    else:
        namespace["_page"] = tempfile.TemporaryDirectory(prefix="readme-")
        folder = Path(namespace["_page"].name)
    os.chdir(folder)


def leave_folder(namespace: dict[str, Any]) -> None:
    """Change back, and delete the page's folder unless it is kept."""
    os.chdir(namespace["_before"])
    if "_page" in namespace:
        namespace["_page"].cleanup()


def unless_marked(run: Callable[[Example], str | None]) -> Callable[[Example], str | None]:
    """Skip a block that the page marks as not run."""

    def evaluate(example: Example) -> str | None:
        preceding_text = example.document.text[: example.region.start]
        return None if NOT_RUN.search(preceding_text) else run(example)

    return evaluate


def run_shell(script: str) -> subprocess.CompletedProcess[str]:
    """Run shell code with the commands of this environment and these sources."""
    commands = [
        f'{name}() {{ {sys.executable} -m {name.replace("-", "_")} "$@"; }}' for name in OURS
    ]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-c", "\n".join(["set -e", *commands, script])],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "PATH": path, "COLUMNS": "100"},
    )


@unless_marked
def run_commands(example: Example) -> str | None:
    """Run a shell block; return its output if it failed."""
    result = run_shell(str(example.parsed))
    return f"{result.stdout}{result.stderr}" if result.returncode else None


@unless_marked
def run_console(example: Example) -> str | None:
    """Run the commands after `$ ` and compare their output; return the first difference."""
    for part in re.split(r"^\$ ", str(example.parsed), flags=re.MULTILINE)[1:]:
        command, _, shown = re.match(r"((?:.*\\\n)*.*)(\n|\Z)((?s:.*))", part).groups()  # type: ignore[union-attr]
        result = run_shell(command)
        if result.returncode:
            return f"$ {command}\n{result.stdout}{result.stderr}"
        if shown.strip() and not same_output(shown, result.stdout):
            return f"$ {command}\nthe page shows\n{shown}\nbut the output is\n{result.stdout}"
    return None


def same_output(shown: str, printed: str) -> bool:
    """Compare line by line; `...` matches any text in a line, and any lines on its own."""
    pattern = "\n".join(line.rstrip() for line in shown.strip().splitlines())
    lines = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    escaped = re.sub(r"([\[\]?*])", r"[\1]", pattern).replace("...", "*")
    return fnmatch.fnmatchcase(lines, escaped)


@unless_marked
def write_named_file(example: Example) -> None:
    """Write a block to the file that its first line names."""
    match = NAME.match(str(example.parsed))
    if match:
        Path(match[1]).parent.mkdir(parents=True, exist_ok=True)
        Path(match[1]).write_text(str(example.parsed))


run_python = unless_marked(PythonEvaluator())

pytest_collect_file = Sybil(
    path=str(ROOT),  # pages anywhere in the repository
    parsers=[
        CodeBlockParser("python", run_python),
        CodeBlockParser("py", run_python),
        CodeBlockParser("bash", run_commands),
        CodeBlockParser("sh", run_commands),
        CodeBlockParser("console", run_console),
        CodeBlockParser("toml", write_named_file),
        CodeBlockParser("jinja", write_named_file),
        CodeBlockParser("jsonl", write_named_file),
    ],
    pattern="*.md",
    excludes=["**/*.zh.md", "*.zh-CN.md"],  # their code is identical to the English pages'
    document_types={".md": Page},
    setup=enter_folder,
    teardown=leave_folder,
).pytest()
