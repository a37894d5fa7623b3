"""Captures NCCL's log during initialization: the adapters that it finds and uses."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LEVEL, FILE = "NCCL_DEBUG", "NCCL_DEBUG_FILE"
LIMIT_BYTES = 256 << 10
RELEVANT = ("NET/", "Using network", "GDR", "P2P is disabled", "NCCL version", "WARN")
"""Substrings of relevant lines."""


@contextmanager
def library_log() -> Iterator[Path]:
    """Let NCCL log to a temporary file, unless the user has set a log file.

    Enter this before the first group is created, as NCCL reads the variables once.
    """
    variables = {LEVEL: "INFO"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nccl.log"
        variables[FILE] = str(path)
        previous = {name: os.environ.get(name) for name in variables}
        if previous[FILE] is None:
            os.environ.update(variables)
        try:
            yield path
        finally:
            for name, value in previous.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def relevant_lines(path: Path) -> str:
    """Return the lines about the network in use; empty without a log."""
    try:
        with path.open("rb") as file:
            text = file.read(LIMIT_BYTES).decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if any(word in line for word in RELEVANT)]
    return "".join(f"{line}\n" for line in dict.fromkeys(lines))
