"""Shows how far a run has come: a bar on a terminal, plain lines elsewhere."""

import sys
from collections import deque
from collections.abc import Mapping
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

WINDOW = 50
"""Steps over which the rate is measured."""


def duration(seconds: float) -> str:
    """Write a length of time for people: `45 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Throughput:
    """Tokens per second and seconds per step over the last steps.

    The first step is left out as soon as there is a second one: it also allocates, compiles and
    connects, and would dominate the first estimate of the time left.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque([(monotonic(), 0)], maxlen=WINDOW)
        self.settled = False
        """Whether the rate is that of steps after the first."""

    def count(self, tokens: int) -> None:
        """Count a step that has just finished."""
        self._steps.append((monotonic(), tokens))
        if not self.settled and len(self._steps) == 3:
            self._steps.popleft()
            self.settled = True

    def pause(self, seconds: float) -> None:
        """Leave out time that went into something else than steps."""
        moved = [(moment + seconds, tokens) for moment, tokens in self._steps]
        self._steps = deque(moved, maxlen=WINDOW)

    @property
    def rate_tokens_per_s(self) -> float:
        """Tokens a second."""
        took = self._steps[-1][0] - self._steps[0][0]
        return sum(tokens for _, tokens in list(self._steps)[1:]) / took if took > 0 else 0.0

    @property
    def step_s(self) -> float:
        """Seconds that a step takes."""
        took = self._steps[-1][0] - self._steps[0][0]
        return took / (len(self._steps) - 1) if len(self._steps) > 1 else 0.0


class RunDisplay:
    """Shows the steps and notes of a run on standard output, or nothing.

    Args:
        total: steps of the whole run.
        every: steps between lines where there is no terminal.
        active: False shows nothing, as on ranks other than 0.
    """

    def __init__(self, *, total: int, every: int, active: bool) -> None:
        self._total = total
        self._every = every
        self._active = active
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def show_step(self, step: int, metrics: Mapping[str, float], throughput: Throughput) -> None:
        """Show that step number `step` (from 1) is made: its metrics, the rate and time left."""
        if not self._active:
            return
        line = "  ".join(f"{name} {_amount(value)}" for name, value in metrics.items())
        if throughput.settled:
            left = duration((self._total - step) * throughput.step_s)
            line += f"  {throughput.rate_tokens_per_s:,.0f} tokens/s  {left} left"
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._on_bar(step, line)
        elif step % self._every == 0 or step in (1, self._total):
            self.note(f"step {step}/{self._total}  {line}")

    def _on_bar(self, step: int, line: str) -> None:
        if self._bar is None:
            columns = [MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")]
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        self._bar.update(self._task, completed=step, description=line)

    def note(self, text: str) -> None:
        """Show a line of its own."""
        if self._active:
            self._console.print(text, markup=False)
            self._console.file.flush()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _amount(value: float) -> str:
    return f"{value:.4f}" if 0.1 <= abs(value) < 1000 else f"{value:.4g}"
