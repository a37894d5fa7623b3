"""Progress on stderr: a bar on a terminal, otherwise a line every ten seconds."""

from time import monotonic
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 10.0
"""Seconds between lines if the output is not a terminal."""


class ProgressDisplay:
    """Show the number of finished units, the rate, and the remaining time.

    Args:
        unit: name of a unit, such as `step`.
        tokens: tokens per unit; the rate is then shown in tokens.
        active: False prints nothing, for processes other than the first.
    """

    def __init__(self, unit: str, *, tokens: int | None = None, active: bool = True) -> None:
        self._unit, self._tokens = unit, tokens
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=not active)
        columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console)
        self._task = self._bar.add_task(unit, total=None)
        self._first: tuple[float, int] | None = None
        self._last_line_s = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def update(self, done: int, total: int, note: str = "") -> None:
        """Show that `done` of `total` units are finished, with a note."""
        now_s = monotonic()
        if self._first is None:  # an earlier process may have done some of the units
            self._first = (now_s, done)
        elapsed_s, new_units = now_s - self._first[0], done - self._first[1]
        parts = [
            f"{self._unit} {done}/{total}",
            note,
            self._rate(new_units / elapsed_s) if new_units else "",
        ]
        if self._console.is_terminal:
            description = "  ".join(filter(None, parts[1:])) or self._unit
            self._bar.update(self._task, completed=done, total=total, description=description)
        elif now_s - self._last_line_s >= LINE_EVERY_S or done == total:
            remaining = f"{(total - done) * elapsed_s / new_units:,.0f} s left" if new_units else ""
            self._console.print("  ".join(filter(None, [*parts, remaining])))
            self._last_line_s = now_s

    def note(self, text: str) -> None:
        """Print a line of text."""
        self._console.print(text, markup=False)

    def _rate(self, units_per_s: float) -> str:
        if self._tokens is None:
            return f"{1 / units_per_s:,.1f} s per {self._unit}"
        return f"{units_per_s * self._tokens:,.0f} tokens/s"
