"""Result of a command, for people and as JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from attrs import evolve, frozen

from ms_compress.figures import figure


@frozen(kw_only=True)
class Outcome:
    """The result of a command."""

    lines: tuple[str, ...]
    """Lines for people."""
    facts: dict[str, Any]
    """JSON document for `--json`."""

    @classmethod
    def of_folder(
        cls, folder: Path, result: str, losses: Sequence[float] = (), **facts: Any
    ) -> Self:
        """Describe a folder that a command wrote, and the training before it, if any.

        Args:
            folder: the written folder.
            result: description of its contents.
            losses: loss of each training step.
            facts: further facts for the JSON document.
        """
        lines, all_facts = [f"{folder}: {result}"], {"folder": str(folder), **facts}
        if losses:
            first, last = losses[0], losses[-1]
            lines.insert(0, f"trained {len(losses)} steps: loss {figure(first)} to {figure(last)}")
            all_facts |= {"steps": len(losses), "first_loss": first, "last_loss": last}
        return cls(lines=tuple(lines), facts=all_facts)

    def with_line(self, line: str, **facts: Any) -> Self:
        """Return this outcome with another line and further facts."""
        return evolve(self, lines=(*self.lines, line), facts=self.facts | facts)
