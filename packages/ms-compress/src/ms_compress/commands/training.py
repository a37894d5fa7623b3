"""How the commands train: with progress on standard error, and going on after a kill."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import attrs
from torch import Tensor, nn

from ms_compress.commands.loading import digest
from ms_compress.commands.progress import Shown
from ms_compress.commands.run_options import ModelRun
from ms_compress.errors import ConfigError
from ms_compress.kept_training import steps_held
from ms_compress.place_lock import alone
from ms_compress.schemes import Scheme
from ms_compress.tuning import tune

__all__ = ["output", "steps_made", "train", "trained"]

NO_FACTS = ("output_dir", "tokenizer", "verify", "tuning")
"""Settings that no step follows from, and those that `tune` itself tells."""


@contextmanager
def output(options: ModelRun) -> Iterator[None]:
    """Hold the place of a run's folder, from before its work until it is written.

    Raises:
        ConfigError: the folder is there already.
        ExportError: another run holds the place, or it cannot be written.
    """
    with alone(options.output_dir):
        if os.path.lexists(options.output_dir):
            if steps_made(options) == options.tuning.steps:
                trained(options)  # it was killed in between
            raise ConfigError(
                f"{options.output_dir} exists; remove it, or choose another output_dir"
            )
        yield


def train(
    model: nn.Module,
    text: Mapping[str, Tensor],
    options: ModelRun,
    *,
    teacher: nn.Module | None = None,
    before_step: Callable[[int], object] | None = None,
    after_step: Callable[[int], object] | None = None,
) -> list[float]:
    """`tune` on what `text_of` read of the run's dataset.

    Until the run's folder is there, a file beside it keeps the state; `trained` removes it.
    """
    how = options.tuning
    with Shown("step", tokens=how.batch_size * how.sequence_length) as shown:
        losses = tune(
            model,
            text,
            how,
            teacher=teacher,
            before_step=before_step,
            after_step=after_step,
            on_loss=lambda step, loss: shown.made(step, how.steps, f"loss {loss:.4f}"),
            kept=_kept(options),
            kept_for=_kept_for(options),
        )
    print(f"trained {len(losses)} steps: loss {losses[0]:.4f} to {losses[-1]:.4f}")
    return losses


def steps_made(options: ModelRun) -> int | None:
    """How many steps an earlier run of the same command has kept, if any."""
    kept = _kept(options)
    return steps_held(kept, _kept_for(options)) if kept.is_file() else None


def trained(options: ModelRun) -> None:
    """The run's folder is written: its training's state is not needed any more."""
    _kept(options).unlink(missing_ok=True)


def _kept(options: ModelRun) -> Path:
    return options.output_dir.with_name(f"{options.output_dir.name}.training")


def _kept_for(options: ModelRun) -> dict[str, str]:
    """What a run's steps follow from beside its text: settings, and what its models hold."""
    settings = attrs.asdict(options, recurse=False)
    folders = {name: settings.pop(name, None) for name in ("model", "teacher")}
    facts = {name: _shown(value) for name, value in settings.items() if name not in NO_FACTS}
    held = {
        name: "not given" if folder is None else digest(folder) for name, folder in folders.items()
    }
    tuning = {f"tuning.{name}": repr(value) for name, value in attrs.asdict(options.tuning).items()}
    return {"command": type(options).__name__, **facts, **tuning, **held}


def _shown(value: object) -> str:
    return repr(str(value)) if isinstance(value, Path | Scheme) else repr(value)
