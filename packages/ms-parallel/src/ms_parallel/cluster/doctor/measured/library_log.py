"""Keeps what NCCL says while it starts: which adapters it found, and which it uses."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LEVEL, FILE = "NCCL_DEBUG", "NCCL_DEBUG_FILE"
LIMIT_BYTES = 256 << 10
KEPT = ("NET/", "Using network", "GDR", "P2P is disabled", "NCCL version", "WARN")
"""Words of the lines that are kept."""


@contextmanager
def library_log() -> Iterator[Path]:
    """Have NCCL write what it does to a file, for as long as nobody has asked for that elsewhere.

    Give the variables before the first group is formed: NCCL reads them once.
    """
    given = {LEVEL: "INFO"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nccl.log"
        given[FILE] = str(path)
        before = {name: os.environ.get(name) for name in given}
        if before[FILE] is None:
            os.environ.update(given)
        try:
            yield path
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def kept_lines(path: Path) -> str:
    """Read the lines that say which network is used; empty where nothing was written."""
    try:
        with path.open("rb") as file:
            text = file.read(LIMIT_BYTES).decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if any(word in line for word in KEPT)]
    return "".join(f"{line}\n" for line in dict.fromkeys(lines))
