"""A fuzz case: a small valid input, the files to damage, and the command that reads them."""

import hashlib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Case", "Command", "command", "contents", "function", "output"]

Command = Callable[[], int]
"""Runs with the damaged input's folder as working directory; returns the exit code."""
Result = Callable[[Path, str], str]
"""Computes the command's result from its folder and its standard output."""


def output(folder: Path, stdout: str) -> str:
    """Use the standard output as the result."""
    return stdout


def contents(*patterns: str) -> Result:
    """Use the checksums of the written files as the result."""

    def read(folder: Path, stdout: str) -> str:
        files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
        sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()]
        return " ".join(sums)

    return read


@dataclass(frozen=True, kw_only=True)
class Case:
    """Input, damaged files and command of one group of mutants."""

    name: str
    make: Callable[[Path], None]
    """Writes the valid input into an empty folder, deterministically if possible."""
    files: tuple[str, ...]
    """Glob patterns of the files to damage, one at a time."""
    run: Command
    weight: float = 1.0
    """Relative number of mutants of this case."""
    sealed: bool = False
    """Exit code 0 requires the valid input's result."""
    result: Result = output
    exit_code: int = 0
    """Exit code for the valid input."""
    trains: bool = False
    """The command trains, so damaged settings may make it long without a fault of the reader."""
    needs: str = ""
    """Module that the case requires."""
    may_be_missing: bool = False
    """A missing file is not damage, because no other file refers to it."""


def command(module: str, *arguments: str) -> Command:
    """Call a package's `main` with these arguments."""

    def run() -> int:
        return int(importlib.import_module(f"{module}.cli").main(list(arguments)) or 0)

    return run


def function(module: str, name: str, path: str, error: str) -> Command:
    """Call a function that reads a file, for files that no command reads.

    The package's `error` counts as bad input, as in a command.
    """

    def run() -> int:
        package = importlib.import_module(module.partition(".")[0] + ".errors")
        try:
            print(getattr(importlib.import_module(module), name)(Path(path)))
        except getattr(package, error) as exception:
            print(exception, file=sys.stderr)
            return 2
        return 0

    return run
