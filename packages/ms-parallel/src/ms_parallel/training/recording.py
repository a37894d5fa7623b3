"""Recordings of a run's steps: a file per recorded step for `ms-parallel schedule`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from ms_parallel.cluster.agreement import run_on_rank_zero
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import Loss
from ms_parallel.engine.report import StepReport
from ms_parallel.pipeline.recorder import recorded_step
from ms_parallel.pipeline.step_file import write_step


@frozen(kw_only=True)
class RecordedSteps:
    """Steps of an engine, of which every N-th writes when each pipeline rank computed what."""

    engine: Engine
    every: int
    """Steps between recordings."""
    folder: Path
    """Folder of the files."""

    def step(
        self, batch: Mapping[str, Any], loss: Loss, *, accept: Callable[[float, float], bool]
    ) -> StepReport:
        """Take a step as `Engine.step` does; record it if it is due."""
        engine, taken = self.engine, self.engine.step_count
        if (taken + 1) % self.every:
            return engine.step(batch, loss, accept=accept)
        report, recorder = engine.record_step(batch, loss, accept=accept)
        recorded = recorded_step(recorder, engine.groups, taken)
        if recorded is not None:
            path = self.folder / f"step-{taken + 1:08}.json"
            run_on_rank_zero(lambda: write_step(path, recorded))
        return report
