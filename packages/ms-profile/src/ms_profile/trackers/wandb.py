"""Send events to Weights & Biases: online, self-hosted, or offline in files to sync later."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from ms_profile.trackers.continued import known_run, new_run_id, remember_run
from ms_profile.trackers.destination import (
    OpenRun,
    Outcome,
    Point,
    RunStart,
    checked_folder,
    need_library,
)

STEP = "training_step"
"""x-axis of all plots: W&B's own step counts calls and cannot go back, this one can."""


@frozen
class Wandb:
    """A run in Weights & Biases; needs `ms-profile[wandb]`.

    A resumed training with the same folder continues the same run. In mode `"offline"`, each start
    creates a folder `offline-run-*` below `FOLDER/wandb`; all have the same run id, so that
    `wandb sync --append` joins them.
    """

    folder: Path = field(converter=checked_folder)
    """Folder for W&B's files and the file that stores the run's id."""
    project: str | None = field(default=None, kw_only=True)
    """W&B project. None: `WANDB_PROJECT` or W&B's default."""
    mode: Literal["online", "offline", "disabled"] | None = field(default=None, kw_only=True)
    """W&B mode. None: `WANDB_MODE`, or depending on whether W&B is logged in."""
    options: Mapping[str, Any] = field(factory=dict, kw_only=True)
    """Additional arguments for `wandb.init`, such as `entity`, `group` and `tags`."""

    title = "W&B"
    measures_system = True

    def check(self) -> None:
        """Check that W&B can be used.

        Raises:
            TrackerError: wandb is not installed.
        """
        need_library("wandb", extra="wandb", package="wandb")

    def open(self, start: RunStart, /) -> OpenRun:
        """Start the run, or continue the run started in this folder."""
        import wandb

        id_file = self.folder / "wandb-run.json"
        existing_id = known_run(id_file, self.title)
        run_id = existing_id or new_run_id()
        self.folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            **{
                "project": self.project,
                "mode": self.mode,
                "dir": str(self.folder),
                "id": run_id,
                "name": start.name,
                "resume": "allow",
                "config": dict(start.settings),
                # Do not capture the training's own output.
                "settings": wandb.Settings(console="off", silent=True),
                **self.options,
            }
        )
        remember_run(id_file, self.title, run_id)
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return _Run(run)


class _Run:
    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, points: Sequence[Point], /) -> None:
        """Log each point at its step; settings go to the run's config."""
        for point in points:
            values = {**point.numbers, **point.texts}
            if point.step is None:
                self._run.config.update(values, allow_val_change=True)
            elif values:
                self._run.log({STEP: point.step, "_timestamp": point.wall_s, **values})

    def close(self, outcome: Outcome, /) -> None:
        """Finish the run; W&B distinguishes only finished and failed runs."""
        self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=1 if outcome == "failed" else 0)
        import wandb

        if wandb.run is None:
            # W&B's service may hold the run a moment longer, and continuing it in this process
            # would then write nothing.
            wandb.teardown()
