"""Events in Weights & Biases: online, on a server of one's own, or offline in files to sync."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from ms_profile.trackers.continued import fresh_name, known_run, remember_run
from ms_profile.trackers.destination import (
    OpenRun,
    Outcome,
    Point,
    RunStart,
    checked_folder,
    need_library,
)

STEP = "training_step"
"""The axis of all curves. W&B's own step counts calls and cannot go back; this one can."""


@frozen
class Wandb:
    """A run of Weights & Biases; needs `ms-profile[wandb]`.

    A training that goes on, with the same folder, goes on in the same run. Where the mode is
    `"offline"`, each start leaves a folder `offline-run-*` below `FOLDER/wandb`; all of them name
    the one run, so that `wandb sync --append` puts them together.
    """

    folder: Path = field(converter=checked_folder)
    """Where W&B's files are kept, and a note that says which run it is."""
    project: str | None = field(default=None, kw_only=True)
    """W&B's project; None leaves it to `WANDB_PROJECT` or W&B."""
    mode: Literal["online", "offline", "disabled"] | None = field(default=None, kw_only=True)
    """None leaves it to `WANDB_MODE`, or to whether W&B is logged in."""
    options: Mapping[str, Any] = field(factory=dict, kw_only=True)
    """Further arguments of `wandb.init`, such as `entity`, `group` and `tags`."""

    title = "W&B"
    measures_system = True

    def check(self) -> None:
        """Refuse at once what cannot work.

        Raises:
            TrackerError: wandb is not installed.
        """
        need_library("wandb", extra="wandb", package="wandb")

    def open(self, start: RunStart, /) -> OpenRun:
        """Begin the run, or go on with the one that was begun in this folder."""
        import wandb

        note = self.folder / "wandb-run.json"
        known = known_run(note, self.title)
        name = known or fresh_name()
        self.folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            **{
                "project": self.project,
                "mode": self.mode,
                "dir": str(self.folder),
                "id": name,
                "name": start.name,
                "resume": "allow",
                "config": dict(start.settings),
                # The training's own lines stay its own.
                "settings": wandb.Settings(console="off", silent=True),
                **self.options,
            }
        )
        remember_run(note, self.title, name)
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return _Run(run)


class _Run:
    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, points: Sequence[Point], /) -> None:
        """Log each point under its step; settings go to the run's config."""
        for point in points:
            values = {**point.numbers, **point.texts}
            if point.step is None:
                self._run.config.update(values, allow_val_change=True)
            elif values:
                self._run.log({STEP: point.step, "_timestamp": point.wall_s, **values})

    def close(self, outcome: Outcome, /) -> None:
        """Finish; W&B knows runs that finished and runs that failed."""
        self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=1 if outcome == "failed" else 0)
        import wandb

        if wandb.run is None:
            # W&B's service may still hold the run for a moment, and one that is gone on with in
            # this process would then write nothing.
            wandb.teardown()
