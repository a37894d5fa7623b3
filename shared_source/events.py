"""Events of a run, passed to a callable as they occur; written as JSON lines by default."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from .files.durable import writing

Fields = Mapping[str, int | float | str]


class OnEvent(Protocol):
    """Callback that receives the name of an event and its flat fields.

    The fields of a `step` event are step, loss, grad_norm, learning_rate, tokens, rate_tokens_per_s
    and the metrics of the loss, if any, by name.
    """

    def __call__(self, kind: str, fields: Fields, /) -> None:
        """Receive an event."""


class JsonLines:
    """Appends each event to a file as one line `{"time_s":...,"kind":"step","step":7,...}`.

    `time_s` is Unix time. NaN and infinity are written as null. If a crash truncated the last line,
    a newline is added first, so that all other lines stay readable.

    Args:
        path: path of the file, which is created if missing.

    Raises:
        WriteError: the disk is full or the file cannot be written.
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
        """Append an event as one line."""
        line = msgspec.json.encode({"time_s": round(time.time(), 3), "kind": kind, **fields})
        with writing(self._path):
            self._file.write(line + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
