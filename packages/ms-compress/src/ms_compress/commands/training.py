"""How the commands train: with progress on standard error, and going on after a kill."""

from collections.abc import Callable
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from ms_compress.commands.finish import tokens_of
from ms_compress.commands.run_options import ModelRun
from ms_compress.errors import ConfigError
from ms_compress.tuning import Tuning, tune

__all__ = ["train", "trained"]

LINE_EVERY_S = 10.0
"""Between lines, where there is no terminal."""


def train(
    model: nn.Module,
    options: ModelRun,
    *,
    teacher: nn.Module | None = None,
    before_step: Callable[[int], object] | None = None,
    after_step: Callable[[int], object] | None = None,
) -> list[float]:
    """`tune` on the run's dataset.

    Until the run's folder is there, a file beside it keeps the state; `trained` removes it.

    Raises:
        ConfigError: the folder is there already, which is better said before the training.
    """
    if options.output_dir.exists():
        raise ConfigError(f"{options.output_dir} exists; remove it, or choose another output_dir")
    kept = _kept(options)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with _Show(options.tuning) as show:
        losses = tune(
            model,
            tokens_of(options, model),
            options.tuning,
            teacher=teacher,
            before_step=before_step,
            after_step=after_step,
            on_loss=show.step,
            kept=kept,
            kept_for=repr(options),
        )
    print(f"trained {len(losses)} steps: loss {losses[0]:.4f} to {losses[-1]:.4f}")
    return losses


def trained(options: ModelRun) -> None:
    """The run's folder is written: its training's state is not needed any more."""
    _kept(options).unlink(missing_ok=True)


def _kept(options: ModelRun) -> Path:
    return options.output_dir.with_name(f"{options.output_dir.name}.training")


class _Show:
    """A bar on a terminal, a line every ten seconds elsewhere: steps, loss, rate, time left."""

    def __init__(self, how: Tuning) -> None:
        self._how = how
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console)
        self._task = self._bar.add_task("", total=how.steps)
        self._first: tuple[float, int] | None = None
        self._told = 0.0

    def __enter__(self) -> "_Show":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def step(self, done: int, loss: float) -> None:
        """So many steps are made."""
        now = monotonic()
        if self._first is None:  # of this process: an earlier one may have made some
            self._first = (now, done)
        took, made = now - self._first[0], done - self._first[1]
        rate = made * self._how.batch_size * self._how.sequence_length / took if made else 0.0
        facts = f"loss {loss:.4f}" + (f"  {rate:,.0f} tokens/s" if made else "")
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done, description=facts)
        elif now - self._told >= LINE_EVERY_S or done == self._how.steps:
            left = (self._how.steps - done) * took / made if made else 0.0
            more = f"  {left:,.0f} s left" if made else ""
            self._console.print(f"step {done}/{self._how.steps}  {facts}{more}")
            self._told = now
