"""Runs the training of a command, with progress, a stop at a signal, and resuming."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from ms_compress.errors import StoppedError
from ms_compress.figures import figure
from ms_compress.interruption import StopSignal
from ms_compress.options import ModelRun
from ms_compress.run.output import RunOutput
from ms_compress.run.progress import ProgressDisplay
from ms_compress.training.loop import tune


def train(
    model: nn.Module,
    rows: Mapping[str, Tensor],
    options: ModelRun,
    output: RunOutput,
    *,
    teacher: nn.Module | None = None,
    before_step: Callable[[int], object] | None = None,
    after_step: Callable[[int], object] | None = None,
) -> list[float]:
    """Train with `tune` on the rows from `training_rows`; return the loss of each step.

    The state is saved in a file next to the output folder until `output.end` removes it.
    SIGTERM or a first Ctrl-C stops after the current step, with its state saved; a second Ctrl-C
    stops at once.

    Raises:
        StoppedError: SIGTERM stopped the training.
        KeyboardInterrupt: Ctrl-C stopped the training.
    """
    tuning, stop = options.tuning, StopSignal()
    tokens = tuning.batch_size * tuning.sequence_length
    with ProgressDisplay("step", tokens=tokens) as display, stop.listening():
        losses = tune(
            model,
            rows,
            tuning,
            teacher=teacher,
            before_step=before_step,
            after_step=after_step,
            on_loss=lambda step, loss: display.update(step, tuning.steps, f"loss {figure(loss)}"),
            stop=lambda: bool(stop.signal_name),
            checkpoint=output.checkpoint,
            checkpoint_identity=output.identity,
        )
    if not stop.signal_name:
        return losses
    message = (
        f"stopped by {stop.signal_name} at step {len(losses)} of {tuning.steps}; the state is saved"
        f" in {output.checkpoint}; the same command resumes it"
    )
    if stop.signal_name == "SIGINT":
        display.note(message)
        raise KeyboardInterrupt
    raise StoppedError(message)
