"""Training of a command: with progress display, and resuming after a kill."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from ms_compress.figures import figure
from ms_compress.options import ModelRun
from ms_compress.run.output import RunOutput
from ms_compress.run.progress import ProgressDisplay
from ms_compress.training.loop import tune


def train(
    model: nn.Module,
    text: Mapping[str, Tensor],
    options: ModelRun,
    output: RunOutput,
    *,
    teacher: nn.Module | None = None,
    before_step: Callable[[int], object] | None = None,
    after_step: Callable[[int], object] | None = None,
) -> list[float]:
    """Train with `tune` on the rows from `training_rows`.

    Until the run's folder exists, a file next to it stores the state; `output.end` removes it.
    """
    tuning = options.tuning
    tokens = tuning.batch_size * tuning.sequence_length
    with ProgressDisplay("step", tokens=tokens) as display:
        return tune(
            model,
            text,
            tuning,
            teacher=teacher,
            before_step=before_step,
            after_step=after_step,
            on_loss=lambda step, loss: display.update(step, tuning.steps, f"loss {figure(loss)}"),
            checkpoint=output.checkpoint,
            checkpoint_identity=output.identity,
        )
