"""A pytest plugin: the Python blocks of a Markdown page run in order, in a folder of its own.

Below `README_FOLDERS`, where that is set, the folder is kept, so that a page can be run again.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from sybil import Document, Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

ROOT = Path(__file__).resolve().parents[1]


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


pytest_collect_file = Sybil(
    path=str(ROOT),  # pages anywhere in the repository
    parsers=[PythonCodeBlockParser()],
    pattern="*.md",
    document_types={".md": Page},
    setup=enter_folder,
    teardown=leave_folder,
).pytest()
