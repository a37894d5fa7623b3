"""A command: a name, what `--help` says, and what it does with the settings of a run file."""

from collections.abc import Callable
from typing import Any

from attrs import frozen

__all__ = ["Command"]


@frozen(kw_only=True)
class Command:
    """One subcommand of `ms-compress`, run as `ms-compress NAME RUN.toml [--set KEY=VALUE]...`."""

    name: str
    help: str
    """One line."""
    example: str
    run: Callable[[dict[str, Any], str], int]
    """Takes settings and the file's name, for messages; returns the exit code, 0 or 1."""
    flags: tuple[str, ...] = ()
    """Settings that an option of this name makes true."""
