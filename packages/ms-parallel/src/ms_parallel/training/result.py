"""What a run has come to: its numbers, and the trained model as a folder."""

import shutil
from pathlib import Path

from attrs import frozen

from ms_parallel.cluster.agreement import first_does
from ms_parallel.files.durable import publish, write_synced, writing
from ms_parallel.training.run import Run
from ms_parallel.training.tokenizer import run_tokenizer

__all__ = ["Result", "result_of", "write_model"]


@frozen(kw_only=True)
class Result:
    """What a run has come to; the same on every process, but for `sample`."""

    step: int
    """Updates made, over all launches."""
    finished: bool
    """False if a signal stopped the run; the same command goes on."""
    stopped_by: str | None
    """The signal that stopped the run, SIGTERM or SIGINT (Ctrl-C); None if it finished."""
    loss: float
    """Of the last step's batch, in nats a token."""
    held_out_loss: float | None
    """At the end; None without held-out text."""
    first_held_out_loss: float | None
    """Before the first step."""
    tokens: int
    """Tokens trained on."""
    seconds: float
    """Time in steps, over all launches."""
    model_folder: Path | None
    """The trained model as a Hugging Face folder; None if not finished."""
    sample: str | None
    """What the model writes after `sample_prompt`."""


def result_of(run: Run, folder: Path | None, sample: str | None) -> Result:
    """The numbers of a run whose model is in `folder`, or that a signal has stopped."""
    standing = run.standing
    return Result(
        step=run.engine.step,
        finished=folder is not None,
        stopped_by=None if folder is not None else run.stop.signal_name,
        loss=standing.loss,
        held_out_loss=standing.held_out_loss,
        first_held_out_loss=standing.first_held_out_loss,
        tokens=standing.tokens,
        seconds=standing.seconds,
        model_folder=folder,
        sample=sample,
    )


def write_model(run: Run, shards: Path) -> Path:
    """Write the model as a Hugging Face folder with its tokenizer; whole or not at all."""
    folder = run.options.output_dir / "model"
    made = folder / "training.json"
    if first_does(lambda: made.is_file() and made.read_bytes() == run.mark()):
        return folder
    aside = folder.with_name("model.partial")
    first_does(lambda: shutil.rmtree(aside, ignore_errors=True))
    run.engine.save(aside, tokenizer=run_tokenizer(shards, run.options.model_folder))
    first_does(lambda: _publish(aside, folder, run.mark()))
    return folder


def _publish(aside: Path, folder: Path, mark: bytes) -> None:
    with writing(folder):
        write_synced(aside / "training.json", mark)
        shutil.rmtree(folder, ignore_errors=True)
        publish(aside, folder)
