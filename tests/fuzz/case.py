"""A case: a small sound input, the files of it that are damaged, and the command that reads it."""

import hashlib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Case", "Command", "command", "contents", "function", "output"]

Command = Callable[[], int]
"""Runs in the folder of the damaged input, as the current one; gives the exit code."""
Result = Callable[[Path, str], str]
"""What the command gave: from its folder and what it printed to standard output."""


def output(folder: Path, printed: str) -> str:
    """What was printed is the result."""
    return printed


def contents(*patterns: str) -> Result:
    """Checksums of the files that were written are the result."""

    def read(folder: Path, printed: str) -> str:
        files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
        sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()]
        return " ".join(sums)

    return read


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one kind of mutant is made of."""

    name: str
    make: Callable[[Path], None]
    """Writes the sound input into an empty folder; the same bytes each time, where it can."""
    files: tuple[str, ...]
    """Patterns of the files that are damaged, one at a time."""
    run: Command
    share: float = 1.0
    """How many of the mutants are of this case, beside others."""
    sealed: bool = False
    """Exit code 0 must then come with the sound input's result."""
    result: Result = output
    exit_code: int = 0
    """What the sound input ends with."""
    trains: bool = False
    """A run that began may take long: that its settings are large is no fault of the reader."""
    needs: str = ""
    """A module without which the case is left out."""
    one_may_miss: bool = False
    """A file that is gone is no damage: nothing else names it."""


def command(module: str, *arguments: str) -> Command:
    """A package's `main` with these arguments."""

    def run() -> int:
        return int(importlib.import_module(f"{module}.cli").main(list(arguments)) or 0)

    return run


def function(module: str, name: str, path: str, error: str) -> Command:
    """A function that reads a file which no command is given by its path.

    Its package's error counts as bad input, as a command would tell it.
    """

    def run() -> int:
        package = importlib.import_module(module.partition(".")[0] + ".errors")
        try:
            print(getattr(importlib.import_module(module), name)(Path(path)))
        except getattr(package, error) as told:
            print(told, file=sys.stderr)
            return 2
        return 0

    return run
