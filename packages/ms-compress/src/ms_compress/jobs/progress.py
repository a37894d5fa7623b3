"""Progress on standard error: a bar on a terminal, a line every ten seconds elsewhere."""

from time import monotonic
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Shown"]

LINE_EVERY_S = 10.0
"""Between lines, where there is no terminal."""


class Shown:
    """Shows how many pieces of some work are done, at what rate, and the time left.

    Args:
        piece: its name, such as `step`.
        tokens: of a piece; the rate is then that of tokens.
    """

    def __init__(self, piece: str, *, tokens: int | None = None) -> None:
        self._piece, self._tokens = piece, tokens
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console)
        self._task = self._bar.add_task(piece, total=None)
        self._first: tuple[float, int] | None = None
        self._told = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def made(self, done: int, total: int, facts: str = "") -> None:
        """So many are done; `facts` are told beside."""
        now = monotonic()
        if self._first is None:  # of this process: an earlier one may have made some
            self._first = (now, done)
        took, made = now - self._first[0], done - self._first[1]
        told = [f"{self._piece} {done}/{total}", facts, self._rate(made / took) if made else ""]
        if self._console.is_terminal:
            description = "  ".join(filter(None, told[1:])) or self._piece
            self._bar.update(self._task, completed=done, total=total, description=description)
        elif now - self._told >= LINE_EVERY_S or done == total:
            left = f"{(total - done) * took / made:,.0f} s left" if made else ""
            self._console.print("  ".join(filter(None, [*told, left])))
            self._told = now

    def _rate(self, pieces_per_s: float) -> str:
        if self._tokens is None:
            return f"{1 / pieces_per_s:,.1f} s a {self._piece}"
        return f"{pieces_per_s * self._tokens:,.0f} tokens/s"
