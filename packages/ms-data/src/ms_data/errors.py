"""The errors that this package raises on purpose; each is also the builtin that fits."""

from pathlib import Path
from typing import ClassVar

_SHOWN_CHARACTERS = 200


def printable(value: object) -> str:
    """Put a path or a value on one printable line of bounded length, for a message."""
    text = str(value)
    if len(text) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2
        text = f"{text[:half]}...{text[-half:]}"
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


class DataError(Exception):
    """Base of all errors of ms-data. Its text is one line: what, where, the remedy."""

    exit_code: ClassVar[int] = 2
    """How a command ends that raises it: what was given has to be mended."""


class SettingError(DataError, ValueError):
    """An argument that cannot be used as given."""


class ConfigError(SettingError):
    """A file of rules, or a setting in one, that cannot be used as given."""


class CorpusError(DataError, ValueError):
    """A corpus that is missing, empty, malformed or not text."""


class TokenizerError(DataError, ValueError):
    """A tokenizer file that cannot be read, or does not fit the shards."""


class OutputError(DataError, OSError):
    """A place that cannot be written: not empty, in use, or out of space."""


class StateError(DataError, ValueError):
    """A saved stream state that belongs to other data or another order."""


class DamageError(DataError, RuntimeError):
    """Bytes on disk that are not those that were written: names the file and the part."""

    def __init__(self, path: Path, part: str, problem: str) -> None:
        super().__init__(
            f"{printable(path)}: {part}: {problem}; restore the file from a copy, or build the "
            "dataset again"
        )
        self.file = path.name
        self.part = part
        self.problem = problem


class WriteError(OutputError):
    """A file or folder that the operating system refuses to write."""
