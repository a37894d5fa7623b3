"""Settings that every trainer shares: where a run lies, what is kept, shown and logged."""

from pathlib import Path

from attrs import field, frozen

from ms_align.errors import ConfigError
from ms_align.events import OnEvent
from ms_align.seeds import LARGEST_SEED
from ms_align.settings import a_path, as_path, flag, whole


def check_length(steps: int | None, epochs: int | None) -> None:
    """Check that a run's length is given once.

    Raises:
        ConfigError: both are given, or neither.
    """
    if (steps is None) == (epochs is None):
        both = "neither" if steps is None else "both"
        raise ConfigError(f"exactly one of steps and epochs must be given, got {both}")


@frozen(kw_only=True, slots=False)  # trainers inherit from more than one
class RunOptions:
    """How a run is kept, shown and resumed."""

    output_dir: Path | None = field(
        default=None, converter=as_path, validator=a_path(optional=True, written="folder")
    )
    """Checkpoints, events and the trained model lie here, and nothing of another run; by default
    `runs/sft`, `runs/ppo` and so on."""
    seed: int = field(default=0, validator=whole(least=0, most=LARGEST_SEED))
    """Seed of all random numbers of the run."""
    evaluate_every: int | None = field(default=None, validator=whole(optional=True))
    """Updates between held-out evaluations; always at the first and last, None for only those."""
    checkpoint_every: int = field(default=50, validator=whole())
    """Updates between checkpoints; always at the end."""
    keep_checkpoints: int = field(default=2, validator=whole())
    """How many of the last ones are kept."""
    resume: bool = field(default=True, validator=flag)
    """Go on from the last complete checkpoint; False refuses where there is one."""
    log_every: int = field(default=10, validator=whole())
    """Updates between lines where there is no terminal."""
    progress: bool = field(default=True, validator=flag)
    """Show steps and metrics."""
    on_event: OnEvent | None = None
    """Takes every event; by default they go to `output_dir/events.jsonl`."""
