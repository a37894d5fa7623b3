"""Settings of the output folder, checkpoints, evaluation and logging."""

from pathlib import Path

from attrs import field, frozen

from ms_align.errors import ConfigError
from ms_align.events import OnEvent
from ms_align.seeds import MAX_SEED
from ms_align.settings import as_path, flag, integer, store_url, valid_path


def check_length(steps: int | None, epochs: int | None) -> None:
    """Check that exactly one of steps and epochs is set.

    Raises:
        ConfigError: both are set, or neither.
    """
    if (steps is None) == (epochs is None):
        both = "neither" if steps is None else "both"
        raise ConfigError(f"either steps or epochs must be set, got {both}")


@frozen(kw_only=True, slots=False)  # trainers inherit from more than one
class RunOptions:
    """Output, checkpoints and logging."""

    output_dir: Path | None = field(
        default=None, converter=as_path, validator=valid_path(optional=True, written="folder")
    )
    """Folder for checkpoints, events and the trained model of this run. Default: `runs/sft`,
    `runs/ppo` and so on."""
    seed: int = field(default=0, validator=integer(minimum=0, maximum=MAX_SEED))
    """Random seed of the run."""
    eval_every: int | None = field(default=None, validator=integer(optional=True))
    """Updates between held-out evaluations. None: only before the first and after the last."""
    checkpoint_every: int = field(default=50, validator=integer())
    """Updates between checkpoints; the last update always saves one."""
    keep_checkpoints: int = field(default=2, validator=integer())
    """Number of recent checkpoints to keep."""
    checkpoint_store: str | None = field(default=None, validator=store_url())
    """URL such as `s3://bucket/run`, to which checkpoints are uploaded while training continues,
    and from which a run without newer local checkpoints resumes. None: local folder only."""
    resume: bool = field(default=True, validator=flag)
    """Resume from the last complete checkpoint. false: fail if the folder has checkpoints."""
    log_every: int = field(default=10, validator=integer())
    """Updates between progress lines when output is not a terminal."""
    progress: bool = field(default=True, validator=flag)
    """Print steps and metrics."""
    on_event: OnEvent | None = None
    """Callable that receives every event. Default: events go to `output_dir/events.jsonl`."""
