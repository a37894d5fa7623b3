"""Errors that this package raises on purpose; each is also a fitting builtin exception."""

from pathlib import PurePath
from typing import ClassVar

_SHOWN_CHARACTERS = 200


def printable(value: object) -> str:
    """Format a value as one printable line of at most 203 characters, for messages."""
    text = str(value)
    if len(text) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2
        text = f"{text[:half]}...{text[-half:]}"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class DataError(Exception):
    """Base class of the errors of ms-data. The message is one line: problem, location, remedy."""

    exit_code: ClassVar[int] = 2
    """Exit code of a command that fails with this error: 2, bad input."""


class SettingError(DataError, ValueError):
    """An invalid argument."""


class ConfigError(SettingError):
    """An invalid rule file, or an invalid setting in one."""


class CorpusError(DataError, ValueError):
    """A corpus that is missing, empty, malformed or not text."""


class TokenizerError(DataError, ValueError):
    """A tokenizer file that cannot be read or does not match the shards."""


class OutputError(DataError, OSError):
    """An output path that cannot be written: not empty, in use, or out of space."""


class StateError(DataError, ValueError):
    """A saved stream state that belongs to other data or to another order."""


class DamageError(DataError, RuntimeError):
    """Data on disk that changed since it was written; names the file and the part."""

    def __init__(self, path: PurePath | str, part: str, problem: str) -> None:
        super().__init__(
            f"{printable(path)}: {part}: {problem}; restore the file from a copy, or rebuild the "
            "dataset"
        )
        self.file = PurePath(path).name
        self.part = part
        self.problem = problem


class RemoteError(DataError, RuntimeError):
    """An object store did not answer completely, even after retries."""

    exit_code: ClassVar[int] = 1


class WriteError(OutputError):
    """A file or folder that the operating system refuses to write."""
