"""Definition of a command: name, help, settings class, and the job that runs it."""

from importlib import import_module
from typing import Any, Self

from attrs import evolve, field, frozen

from ms_compress.settings.keys import KeyGroup, class_path, groups_of
from ms_compress.settings.template import template_text


@frozen(kw_only=True)
class Outcome:
    """The result of a command."""

    lines: tuple[str, ...]
    """Lines for people."""
    facts: dict[str, Any]
    """JSON document for `--json`."""

    def with_line(self, line: str, **facts: Any) -> Self:
        """Return this outcome with another line and further facts."""
        return evolve(self, lines=(*self.lines, line), facts=self.facts | facts)


@frozen(kw_only=True)
class Command:
    """A subcommand of `ms-compress`, run as `ms-compress NAME RUN.toml [KEY=VALUE]...`."""

    name: str
    help: str
    """Help text, one line."""
    example: str
    options: type
    """attrs class of its settings."""
    job: str
    """Module in `ms_compress.jobs`, imported (with torch) when the command runs."""
    flags: tuple[str, ...] = field(default=())
    """Settings that a command-line option of the same name sets to true."""
    arguments: tuple[str, ...] = field(default=())
    """Settings that command-line options of the same name give, so that a model folder can be given
    in place of a run file."""
    begins_with: tuple[str, ...] = ("dataset",)
    """Optional keys that a new run file sets, as most runs need them."""

    def groups(self) -> list[KeyGroup]:
        """Return the keys of its run files: required ones first, then the others by class."""
        groups = groups_of(class_path(self.options))
        needed = tuple(key for group in groups for key in group.keys if key.required)
        optional = [evolve(g, keys=tuple(k for k in g.keys if not k.required)) for g in groups]
        return [KeyGroup(title="Needed", keys=needed), *(group for group in optional if group.keys)]

    def template(self) -> str:
        """Return a run file with every key, with examples for required and usual keys."""
        title = f"ms-compress {self.name} RUN.toml: {self.help}."
        groups = self.groups()
        examples = {
            key.name: _example(key.example, self.name)
            for group in groups
            for key in group.keys
            if key.example is not None and (key.required or key.name in self.begins_with)
        }
        return template_text(title, groups, examples)

    def run(self, options: Any) -> Outcome:
        """Run the job with these settings."""
        job = import_module(f"ms_compress.jobs.{self.job}")
        outcome: Outcome = job.run(options)
        return outcome


def _example(value: Any, command: str) -> Any:
    return value.replace("{command}", command) if isinstance(value, str) else value
