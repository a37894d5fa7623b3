"""The result of a run: its numbers, and the trained model as a folder."""

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
    """What a run has come to; the same on every process, but for `sample`."""

    step: int
    """Updates made, over all launches."""
    finished: bool
    """False if a signal stopped the run; the same command resumes."""
    stopped_by: str | None
    """The signal that stopped the run, SIGTERM or SIGINT (Ctrl-C); None if it finished."""
    loss: float
    """Loss of the last step's batch, in nats a token."""
    held_out_loss: float | None
    """Loss on held-out text at the end; None where there is no such text."""
    first_held_out_loss: float | None
    """Loss on held-out text before the first step."""
    tokens: int
    """Tokens trained on."""
    seconds: float
    """Time in steps, over all launches."""
    model_folder: Path | None
    """The trained model as a Hugging Face folder; None if not finished."""
    sample: str | None
    """What the model writes after `sample_prompt`."""
    shares: tuple[int, ...] = ()
    """Rows of the global batch that each data rank took at the end."""
    slow_ranks: tuple[int, ...] = ()
    """Data ranks that were slow beside the others, where shares were measured."""


def printable(text: str) -> str:
    """Remove control characters, which a terminal would obey."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def write_model(folder: Path, mark: Callable[[], bytes], save: Callable[[Path], None]) -> Path:
    """Write the trained model with `save`; whole or not at all.

    Args:
        folder: where it stands when it is written; nothing is done if it is there already.
        mark: on the first process, what says of which training it is.
        save: writes it to a folder; every process calls it.
    """
    run_on_rank_zero(lambda: restore_folder(folder))
    made = folder / "training.json"
    if run_on_rank_zero(lambda: made.is_file() and made.read_bytes() == mark()):
        return folder
    aside = folder.with_name("model.partial")
    run_on_rank_zero(lambda: _clear(aside))
    save(aside)
    run_on_rank_zero(lambda: _publish(aside, folder, mark()))
    return folder


def _clear(aside: Path) -> None:
    if aside.is_symlink():  # never write through a link under the predictable name
        aside.unlink()
    shutil.rmtree(aside, ignore_errors=True)


def _publish(aside: Path, folder: Path, mark: bytes) -> None:
    with writing(folder):
        write_synced(aside / "training.json", mark)
        sync_folder(aside)
        replace_folder(folder, aside)
