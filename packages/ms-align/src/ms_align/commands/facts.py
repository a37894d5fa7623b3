"""What a run's command prints with `--json`, and its exit code."""

from pathlib import Path
from typing import Any

from ms_align.entry import DONE, FAILED, INTERRUPTED
from ms_align.run.loop import Result

__all__ = ["facts_of"]


def facts_of(result: Result, folder: Path) -> dict[str, Any]:
    """The facts of a result; `code` is 130 after Ctrl-C and 1 after another signal."""
    stopped = INTERRUPTED if result.signal_name == "SIGINT" else FAILED
    return {
        "code": DONE if result.finished else stopped,
        "finished": result.finished,
        "step": result.step,
        "seconds": round(result.seconds, 3),
        "first": dict(result.first),
        "last": dict(result.last),
        "output_dir": str(folder),
    }
