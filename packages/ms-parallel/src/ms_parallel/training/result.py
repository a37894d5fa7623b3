"""Result of a run: its numbers and the folder of the trained model."""

import shutil
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from ms_parallel.cluster.agreement import run_on_rank_zero
from ms_parallel.files.durable import (
    replace_folder,
    restore_folder,
    sync_folder,
    write_synced,
    writing,
)


@frozen(kw_only=True)
class Result:
    """Result of a training run; the same on every process, except `sample`."""

    step: int
    """Optimizer steps taken over all launches."""
    finished: bool
    """False if a signal stopped the run; the same command resumes."""
    stopped_by: str | None
    """Signal that stopped the run, SIGTERM or SIGINT (Ctrl-C); None if it finished."""
    loss: float
    """Loss of the last step's batch, in nats per token."""
    held_out_loss: float | None
    """Loss on held-out text at the end; None without held-out text."""
    first_held_out_loss: float | None
    """Loss on held-out text before the first step."""
    tokens: int
    """Tokens trained on."""
    seconds: float
    """Time spent in steps over all launches."""
    model_folder: Path | None
    """The trained model as a Hugging Face folder; None if not finished."""
    sample: str | None
    """Continuation of `sample_prompt`; None without a prompt."""
    shares: tuple[int, ...] = ()
    """Rows of the global batch per data rank at the end."""
    slow_ranks: tuple[int, ...] = ()
    """Data ranks that were slower than the others, with `shares = "measured"`."""


def printable(text: str) -> str:
    """Replace control characters, which a terminal would interpret."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def write_model(folder: Path, mark: Callable[[], bytes], save: Callable[[Path], None]) -> Path:
    """Write the trained model atomically with `save`, unless `folder` has this model already.

    Args:
        folder: final folder of the model.
        mark: returns the stamp of this training run; called on rank 0.
        save: writes the model to a folder; called on every process.
    """
    # Undo a replacement that a crash has interrupted.
    run_on_rank_zero(lambda: restore_folder(folder))
    stamp = folder / "training.json"
    # Relaunching a finished run writes nothing.
    if run_on_rank_zero(lambda: stamp.is_file() and stamp.read_bytes() == mark()):
        return folder
    partial = folder.with_name("model.partial")
    run_on_rank_zero(lambda: _clear(partial))
    save(partial)
    run_on_rank_zero(lambda: _publish(partial, folder, mark()))
    return folder


def _clear(partial: Path) -> None:
    if partial.is_symlink():  # never write through a link under the predictable name
        partial.unlink()
    shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, folder: Path, mark: bytes) -> None:
    with writing(folder):
        # Written before the folder gets its name, so a model with a stamp is complete.
        write_synced(partial / "training.json", mark)
        sync_folder(partial)
        replace_folder(folder, partial)
