"""Progress of a run: a progress bar on a terminal, plain lines elsewhere."""

import sys
from collections import deque
from collections.abc import Mapping
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

WINDOW = 50
"""Number of recent steps in the rate's moving average."""


def duration(seconds: float) -> str:
    """Format a duration: `45 s`, `3 min 05 s`, `2 h 10 min`."""
    total = max(round(seconds), 0)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"


class Throughput:
    """Moving average of tokens per second and seconds per step.

    The first step is excluded once a second one has finished. It also pays for allocation,
    compilation and connection setup, which would distort the first time estimates.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque([(monotonic(), 0)], maxlen=WINDOW)
        self.warmed_up = False
        """True once the rate excludes the first step."""

    def count(self, tokens: int) -> None:
        """Record a step that has just finished."""
        self._steps.append((monotonic(), tokens))
        if not self.warmed_up and len(self._steps) == 3:
            self._steps.popleft()
            self.warmed_up = True

    def pause(self, seconds: float) -> None:
        """Exclude time spent outside steps, such as in evaluation."""
        shifted = [(finished_s + seconds, tokens) for finished_s, tokens in self._steps]
        self._steps = deque(shifted, maxlen=WINDOW)

    @property
    def rate_tokens_per_s(self) -> float:
        """Tokens per second."""
        seconds = self._steps[-1][0] - self._steps[0][0]
        return sum(tokens for _, tokens in list(self._steps)[1:]) / seconds if seconds > 0 else 0.0

    @property
    def step_s(self) -> float:
        """Mean seconds per step."""
        seconds = self._steps[-1][0] - self._steps[0][0]
        return seconds / (len(self._steps) - 1) if len(self._steps) > 1 else 0.0


class RunDisplay:
    """Prints the steps and notes of a run to standard output.

    Args:
        total: number of steps in the run.
        every: steps between lines if standard output is not a terminal.
        active: False prints nothing, for ranks other than 0.
    """

    def __init__(self, *, total: int, every: int, active: bool) -> None:
        self._total = total
        self._every = every
        self._active = active
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def show_step(self, step: int, metrics: Mapping[str, float], throughput: Throughput) -> None:
        """Show a finished step (counted from 1): metrics, throughput and time left."""
        if not self._active:
            return
        line = "  ".join(f"{name} {_amount(value)}" for name, value in metrics.items())
        if throughput.warmed_up:
            time_left = duration((self._total - step) * throughput.step_s)
            line += f"  {throughput.rate_tokens_per_s:,.0f} tokens/s  {time_left} left"
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
        """Print a line of text."""
        if self._active:
            self._console.print(text, markup=False)
            self._console.file.flush()

    def close(self) -> None:
        """Stop the bar and restore the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _amount(value: float) -> str:
    return f"{value:.4f}" if 0.1 <= abs(value) < 1000 else f"{value:.4g}"
