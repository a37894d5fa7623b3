"""A pytest plugin: the Python blocks of a Markdown page run in order, in a folder of its own.

On the pages of `docs/how-to` the commands run too: a `bash` block in a shell that stops at the
first failure, and a `toml` or `jinja` block whose first line names a file is written to it. What
needs another machine stands in an `sh` block there, which nothing runs.

Below `README_FOLDERS`, where that is set, the folder is kept, so that a page can be run again.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sybil import Document, Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

ROOT = Path(__file__).resolve().parents[1]
OURS = sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())
NAME = re.compile(r"\A(?:# |\{# ?)([\w./-]+\.\w+)")
LONGEST_S = 120


class Page(Document):
    """A page that knows where it lies."""

    def __init__(self, text: str, path: str) -> None:
        super().__init__(text, path)
        self.namespace["_page_path"] = path


def enter_folder(namespace: dict[str, Any]) -> None:
    """Start a page in its own folder, empty at first."""
    namespace["_before"] = os.getcwd()
    kept = os.environ.get("README_FOLDERS")
    if kept:
        page = Path(namespace["_page_path"]).relative_to(ROOT)
        folder = Path(kept) / "-".join(page.parts)
        folder.mkdir(parents=True, exist_ok=True)
    else:
        namespace["_page"] = tempfile.TemporaryDirectory(prefix="readme-")
        folder = Path(namespace["_page"].name)
    os.chdir(folder)


def leave_folder(namespace: dict[str, Any]) -> None:
    """Go back, and remove what the page wrote unless it is kept."""
    os.chdir(namespace["_before"])
    if "_page" in namespace:
        namespace["_page"].cleanup()


def with_commands(example: Example) -> bool:
    """Whether a page's commands run too."""
    return "how-to" in Path(example.path).parts


def run_commands(example: Example) -> str | None:
    """Run a shell block; what it printed is the failure's text."""
    if not with_commands(example):
        return None
    functions = [
        f'{name}() {{ {sys.executable} -m {name.replace("-", "_")} "$@"; }}' for name in OURS
    ]
    script = "\n".join(["set -e", *functions, str(example.parsed)])
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=LONGEST_S, check=False
    )
    return f"{done.stdout}{done.stderr}" if done.returncode else None


def write_named_file(example: Example) -> None:
    """Write a block to the file that its first line names."""
    named = NAME.match(str(example.parsed))
    if named and with_commands(example):
        Path(named[1]).write_text(str(example.parsed))


pytest_collect_file = Sybil(
    path=str(ROOT),  # pages anywhere in the repository
    parsers=[
        PythonCodeBlockParser(),
        CodeBlockParser("bash", run_commands),
        CodeBlockParser("toml", write_named_file),
        CodeBlockParser("jinja", write_named_file),
    ],
    pattern="*.md",
    excludes=["**/*.zh.md"],  # their code is that of the English pages, to the letter
    document_types={".md": Page},
    setup=enter_folder,
    teardown=leave_folder,
).pytest()
