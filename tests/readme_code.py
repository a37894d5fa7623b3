"""A pytest plugin that executes the code of Markdown pages, each page in a folder of its own.

Blocks run in order, in a folder that is empty at first: `python` and `py` in one namespace;
`bash` and `sh` in a shell that stops at the first failure; of `console` each line after `$ `, and
the lines below it are compared with what it prints, where `...` stands for anything. A `toml`,
`jinja` or `jsonl` block whose first line is a comment with a file's name is written to that file.

A block that cannot run as it stands follows a comment that says why: `<!-- not run: REASON -->`.
tests/test_documented_commands.py parses its commands all the same.

Below `README_FOLDERS`, where that is set, folders are kept, so that a page can be run again.
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
LONGEST_S = 300


class Page(Document):
    """A page that knows its path."""

    def __init__(self, text: str, path: str) -> None:
        super().__init__(text, path)
        self.namespace["_page_path"] = path


def enter_folder(namespace: dict[str, Any]) -> None:
    """Start a page in its own folder, empty at first."""
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
    """Go back, and remove what the page wrote unless it is to stay."""
    os.chdir(namespace["_before"])
    if "_page" in namespace:
        namespace["_page"].cleanup()


def unless_marked(run: Callable[[Example], str | None]) -> Callable[[Example], str | None]:
    """Leave out a block that the page says is not run."""

    def evaluate(example: Example) -> str | None:
        before = example.document.text[: example.region.start]
        return None if NOT_RUN.search(before) else run(example)

    return evaluate


def in_shell(script: str) -> subprocess.CompletedProcess[str]:
    """Run a piece of shell with the commands of this environment and these sources."""
    commands = [
        f'{name}() {{ {sys.executable} -m {name.replace("-", "_")} "$@"; }}' for name in OURS
    ]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-c", "\n".join(["set -e", *commands, script])],
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
        env={**os.environ, "PATH": path, "COLUMNS": "100"},
    )


@unless_marked
def run_commands(example: Example) -> str | None:
    """Run a shell block; returns what it printed if it failed."""
    done = in_shell(str(example.parsed))
    return f"{done.stdout}{done.stderr}" if done.returncode else None


@unless_marked
def run_console(example: Example) -> str | None:
    """Run the commands after `$ ` and compare what they print; returns the first difference."""
    for part in re.split(r"^\$ ", str(example.parsed), flags=re.MULTILINE)[1:]:
        command, _, shown = re.match(r"((?:.*\\\n)*.*)(\n|\Z)((?s:.*))", part).groups()  # type: ignore[union-attr]
        done = in_shell(command)
        if done.returncode:
            return f"$ {command}\n{done.stdout}{done.stderr}"
        if shown.strip() and not same_output(shown, done.stdout):
            return f"$ {command}\nthe page shows\n{shown}\nand it prints\n{done.stdout}"
    return None


def same_output(shown: str, printed: str) -> bool:
    """Compare line by line; `...` in a line that is shown stands for any text, alone for lines."""
    pattern = "\n".join(line.rstrip() for line in shown.strip().splitlines())
    lines = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    escaped = re.sub(r"([\[\]?*])", r"[\1]", pattern).replace("...", "*")
    return fnmatch.fnmatchcase(lines, escaped)


@unless_marked
def write_named_file(example: Example) -> None:
    """Write a block to the file that its first line names."""
    named = NAME.match(str(example.parsed))
    if named:
        Path(named[1]).parent.mkdir(parents=True, exist_ok=True)
        Path(named[1]).write_text(str(example.parsed))


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
    excludes=["**/*.zh.md", "*.zh-CN.md"],  # their code is that of the English pages, to the letter
    document_types={".md": Page},
    setup=enter_folder,
    teardown=leave_folder,
).pytest()
