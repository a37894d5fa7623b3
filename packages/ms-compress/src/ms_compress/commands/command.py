"""A command: its name, its help, its settings and the job that they are handed to."""

from importlib import import_module
from typing import Any

from attrs import evolve, field, frozen

from ms_compress.settings.keys import KeyGroup, groups_of, place_of
from ms_compress.settings.template import template_text


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
    begins_with: tuple[str, ...] = ("dataset",)
    """Keys with a default that its run files usually give."""

    def groups(self) -> list[KeyGroup]:
        """List the keys of its run files: those that must be given first, the rest by class."""
        groups = groups_of(place_of(self.options))
        needed = tuple(key for group in groups for key in group.keys if key.required)
        rest = [evolve(g, keys=tuple(k for k in g.keys if not k.required)) for g in groups]
        return [KeyGroup(title="Needed", keys=needed), *(group for group in rest if group.keys)]

    def template(self) -> str:
        """Write a run file with every key; what must be given, or usually is, holds an example."""
        title = f"ms-compress {self.name} RUN.toml: {self.help}."
        groups = self.groups()
        begin = {
            key.name: _example(key.example, self.name)
            for group in groups
            for key in group.keys
            if key.example is not None and (key.required or key.name in self.begins_with)
        }
        return template_text(title, groups, begin)

    def run(self, options: Any) -> Outcome:
        """Do the job with these settings."""
        job = import_module(f"ms_compress.jobs.{self.job}")
        outcome: Outcome = job.run(options)
        return outcome


def _example(value: Any, command: str) -> Any:
    return value.replace("{command}", command) if isinstance(value, str) else value
