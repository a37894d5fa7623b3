"""A pytest plugin: the Python blocks of a Markdown page run in order, in a fresh folder a page."""

import os
import tempfile
from pathlib import Path
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser


def enter_folder(namespace: dict[str, Any]) -> None:
    """Start a page in an empty folder of its own."""
    folder = tempfile.TemporaryDirectory(prefix="readme-")
    namespace["_page"] = (folder, os.getcwd())
    os.chdir(folder.name)


def leave_folder(namespace: dict[str, Any]) -> None:
    """Go back, and remove what the page wrote."""
    folder, before = namespace["_page"]
    os.chdir(before)
    folder.cleanup()


pytest_collect_file = Sybil(
    path=str(Path(__file__).resolve().parents[1]),  # pages anywhere in the repository
    parsers=[PythonCodeBlockParser()],
    pattern="*.md",
    setup=enter_folder,
    teardown=leave_folder,
).pytest()
