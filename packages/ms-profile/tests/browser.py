"""Render a page in headless Chromium."""

import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["browse", "browse_address", "needs_browser"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--virtual-time-budget=8000",
)  # fmt: skip
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")


def browse(page: Path, part: str, tmp_path: Path) -> str:
    """Return the document after its scripts have run."""
    return browse_address(f"file://{page}#{part}", tmp_path)


def browse_address(address: str, tmp_path: Path, *, width: int = 800) -> str:
    """Return the document at an address after its scripts have run."""
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom"]
    process = subprocess.run(
        [*command, f"--window-size={width},900", address],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return process.stdout
