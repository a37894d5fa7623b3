"""Predicted and measured step times of planned runs, for reporting and correcting errors of plans.

A planned run has its plan and its events in its output folder. The step times of all runs are also
stored in a file next to these folders, so that deleted runs still count.
"""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError
from ms_parallel.planner.record.plan_file import FILE as PLAN
from ms_parallel.planner.record.plan_file import Plan, read_plan
from ms_parallel.planner.record.sealed import read_sealed, write_sealed

logger = logging.getLogger(__name__)
FILE = "planned-runs.json"
"""File name, next to the output folders of runs."""
EVENTS = "events.jsonl"
MIN_STEPS = 5
"""Minimum steps of a run that counts, including warm-up."""
WARM_UP = 2
MAX_RUNS = 200
MAX_FOLDERS = 10_000


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted and measured step time of a planned run."""

    run: str
    """Name of its output folder."""
    layout: str
    times: str
    """Source of the plan's times; corrections use only runs with the same source."""
    predicted_s: float
    """Predicted seconds of a step, without correction."""
    correction: float
    """Factor applied to the prediction."""
    measured_s: float
    """Median seconds of a step."""

    @property
    def error(self) -> float:
        """Relative error of the plan; positive if it predicted too much time."""
        return self.predicted_s * self.correction / self.measured_s - 1


class History(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="planned-runs.v1"
):
    """Planned runs, oldest first."""

    runs: list[PlannedRun] = []

    def of(self, times: str) -> list[PlannedRun]:
        """Runs whose times have this source."""
        return [run for run in self.runs if run.times == times]

    def correction(self, times: str) -> float:
        """Correction factor for times from a source: the median of measured over predicted time.

        The median of logarithms is the geometric mean of the two middle ratios if their number is
        even, so errors by 1/2 and by 2 cancel.
        """
        ratios = [log(run.measured_s / run.predicted_s) for run in self.of(times)]
        return exp(median(ratios)) if ratios else 1.0


def learn(folder: Path) -> History:
    """Collect the planned runs in a folder, and update the history file in it.

    Raises:
        ConfigError: the history file is damaged.
        CheckpointError: it cannot be written.
    """
    path = folder / FILE
    try:
        stored = read_sealed(path, History, label="a list of planned runs") or History()
    except ConfigError as error:
        raise ConfigError(f"{error}; delete it to start over") from error
    runs = {run.run: run for run in stored.runs}
    for run in _runs(folder):
        runs.pop(run.run, None)  # move it to the end
        runs[run.run] = run
    history = History(runs=list(runs.values())[-MAX_RUNS:])
    if history != stored:
        write_sealed(path, history)
    return history


def _runs(folder: Path) -> Iterator[PlannedRun]:
    """Yield the planned runs in a folder that have enough steps."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        # The range limits how many folders are read.
        names = sorted(entry.name for _, entry in zip(range(MAX_FOLDERS), entries, strict=False))
    for name in names:
        try:
            plan = read_plan(folder / name / PLAN)
        except ConfigError as error:
            logger.warning("warning: %s; this run is not used to correct plans", error)
            continue
        measured = _step_s(folder / name / EVENTS, plan) if plan is not None else None
        if plan is None or measured is None:
            continue
        best = plan.best[0]
        yield PlannedRun(
            run=name,
            layout=str(Layout(**best.layout)),
            times=plan.times,
            # The plan's times include its correction.
            predicted_s=best.step.total / plan.correction,
            correction=plan.correction,
            measured_s=measured,
        )


def _step_s(path: Path, plan: Plan) -> float | None:
    """Median step time under the planned layout, in seconds; None with too few steps."""
    if not path.is_file():
        return None
    planned, layout, steps = str(Layout(**plan.best[0].layout)), "", []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            event = _event(line)
            # After a resume with another layout, steps do not count.
            if event.get("kind") == "begin":
                layout = str(event.get("layout"))
            elif event.get("kind") == "step" and layout == planned:
                tokens, rate = event.get("tokens"), event.get("rate_tokens_per_s")
                if isinstance(tokens, int) and isinstance(rate, int | float) and rate > 0:
                    steps.append(tokens / rate)
    return _median(steps)


def _event(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:  # the incomplete last line of a killed run
        return {}
    return event if isinstance(event, dict) else {}


def _median(steps: Sequence[float]) -> float | None:
    return median(steps[WARM_UP:]) if len(steps) >= MIN_STEPS else None
