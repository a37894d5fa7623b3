"""Render a page in headless Chromium."""

import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["browse", "needs_browser"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--virtual-time-budget=8000",
)  # fmt: skip
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")


def browse(page: Path, part: str, tmp_path: Path) -> str:
    """Return the document after its scripts have run."""
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom"]
    process = subprocess.run(
        [*command, f"file://{page}#{part}"], capture_output=True, text=True, timeout=120, check=True
    )
    return process.stdout
