"""Every error this package raises on purpose; each is also the builtin that fits."""

from pathlib import Path

__all__ = [
    "CorpusError",
    "DamageError",
    "DataError",
    "OutputError",
    "SettingError",
    "StateError",
    "TokenizerError",
    "WriteError",
]


class DataError(Exception):
    """Base of all errors of ms-data. Its text is one line: what, where, the remedy."""


class SettingError(DataError, ValueError):
    """An argument that cannot be used as given."""


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
            f"{path}: {part}: {problem}; restore the file from a copy, or build the dataset again"
        )
        self.file = path.name
        self.part = part
        self.problem = problem


class WriteError(OutputError):
    """A file or folder that the operating system does not let be written."""
