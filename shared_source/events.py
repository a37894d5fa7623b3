"""Events of a run, handed to any callable as they happen; JSON lines by default."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from .files.durable import writing

Fields = Mapping[str, int | float | str]


class OnEvent(Protocol):
    """Takes an event: a kind, and flat fields.

    The kind `step` carries step, loss, grad_norm, learning_rate, tokens, rate_tokens_per_s, and
    the metrics of the loss, where it has any, under their own names.
    """

    def __call__(self, kind: str, fields: Fields, /) -> None:
        """Take one event."""


class JsonLines:
    """Appends each event to a file as one line `{"time_s":...,"kind":"step","step":7,...}`.

    `time_s` is Unix time. A number that is not finite is written as null. A line that a crash
    cut short is ended first, so that the lines around it can be read.

    Args:
        path: the file; made if missing.

    Raises:
        WriteError: the disk is full or the place cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)
            if self._file.seek(0, os.SEEK_END):
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")

    def __call__(self, kind: str, fields: Fields, /) -> None:
        """Append one line."""
        line = msgspec.json.encode({"time_s": round(time.time(), 3), "kind": kind, **fields})
        with writing(self._path):
            self._file.write(line + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
