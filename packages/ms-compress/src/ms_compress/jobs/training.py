"""Training as the commands do it: with progress, and going on after a kill."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from ms_compress.commands.options import ModelRun
from ms_compress.jobs.output import RunOutput
from ms_compress.jobs.progress import Shown
from ms_compress.training.loop import tune

__all__ = ["train"]


def train(
    model: nn.Module,
    text: Mapping[str, Tensor],
    options: ModelRun,
    place: RunOutput,
    *,
    teacher: nn.Module | None = None,
    before_step: Callable[[int], object] | None = None,
    after_step: Callable[[int], object] | None = None,
) -> list[float]:
    """Train with `tune` on the rows that `training_rows` read of the run's dataset.

    Until the run's folder is there, a file beside it keeps the state; `place.end` removes it.
    """
    how = options.tuning
    with Shown("step", tokens=how.batch_size * how.sequence_length) as shown:
        return tune(
            model,
            text,
            how,
            teacher=teacher,
            before_step=before_step,
            after_step=after_step,
            on_loss=lambda step, loss: shown.made(step, how.steps, f"loss {loss:.4f}"),
            checkpoint=place.checkpoint,
            checkpoint_identity=place.identity,
        )
