"""Progress on standard error: a bar on a terminal, a line every ten seconds elsewhere."""

from time import monotonic
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 10.0
"""Between lines, where there is no terminal."""


class ProgressDisplay:
    """Shows how many units of some work are done, at what rate, and the time left.

    Args:
        unit: its name, such as `step`.
        tokens: tokens of a unit; the rate is then that of tokens.
    """

    def __init__(self, unit: str, *, tokens: int | None = None) -> None:
        self._unit, self._tokens = unit, tokens
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
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
        """Show that `done` of `total` units are done, and a note beside."""
        now = monotonic()
        if self._first is None:  # of this process: an earlier one may have made some
            self._first = (now, done)
        took, made = now - self._first[0], done - self._first[1]
        parts = [f"{self._unit} {done}/{total}", note, self._rate(made / took) if made else ""]
        if self._console.is_terminal:
            description = "  ".join(filter(None, parts[1:])) or self._unit
            self._bar.update(self._task, completed=done, total=total, description=description)
        elif now - self._last_line_s >= LINE_EVERY_S or done == total:
            left = f"{(total - done) * took / made:,.0f} s left" if made else ""
            self._console.print("  ".join(filter(None, [*parts, left])))
            self._last_line_s = now

    def _rate(self, units_per_s: float) -> str:
        if self._tokens is None:
            return f"{1 / units_per_s:,.1f} s a {self._unit}"
        return f"{units_per_s * self._tokens:,.0f} tokens/s"
