"""A command: its name, its help, its settings and the job that they are handed to."""

from importlib import import_module
from typing import Any

from attrs import field, frozen

__all__ = ["Command", "Outcome"]


@frozen(kw_only=True)
class Outcome:
    """The result of a command."""

    lines: tuple[str, ...]
    """For people."""
    facts: dict[str, Any]
    """For `--json`, which prints them as one document."""


@frozen(kw_only=True)
class Command:
    """One subcommand of `ms-compress`, run as `ms-compress NAME RUN.toml [--set KEY=VALUE]...`."""

    name: str
    help: str
    """One line."""
    example: str
    options: type
    """The attrs class of its settings."""
    job: str
    """The module of `ms_compress.jobs` that does it; imported, with torch, when it is done."""
    flags: tuple[str, ...] = field(default=())
    """Settings that an option of this name makes true."""

    def run(self, options: Any) -> Outcome:
        """Do the job with these settings."""
        job = import_module(f"ms_compress.jobs.{self.job}")
        outcome: Outcome = job.run(options)
        return outcome
