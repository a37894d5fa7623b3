"""What plans have predicted and runs have taken: the error of plans, and what corrects the next.

Each run that was planned keeps its plan and its events in its folder. What both say is kept in a
file beside the runs' folders too, so that a run that is deleted still counts.
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
"""Its name beside the runs' folders."""
EVENTS = "events.jsonl"
LEAST_STEPS = 5
"""Steps after which a run counts, the first two of which warm up."""
WARM_UP = 2
MOST_RUNS = 200
MOST_FOLDERS = 10_000


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run that was planned."""

    run: str
    """Name of its folder."""
    layout: str
    times: str
    """Where its plan's times came from; other times are corrected by other runs."""
    predicted_s: float
    """Predicted seconds of a step, uncorrected."""
    correction: float
    """What this was multiplied by."""
    measured_s: float
    """Median of its steps."""

    @property
    def error(self) -> float:
        """Share by which its plan said more than it took."""
        return self.predicted_s * self.correction / self.measured_s - 1


class History(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="planned-runs.v1"
):
    """All of them, the oldest first."""

    runs: list[PlannedRun] = []

    def of(self, times: str) -> list[PlannedRun]:
        """List the runs whose times came from the same place."""
        return [run for run in self.runs if run.times == times]

    def correction(self, times: str) -> float:
        """Return the factor that corrects such times: the median of measured over predicted."""
        ratios = [log(run.measured_s / run.predicted_s) for run in self.of(times)]
        return exp(median(ratios)) if ratios else 1.0


def learn(folder: Path) -> History:
    """Collect what is known of the planned runs in a folder, and update the file in it.

    Raises:
        ConfigError: the file is damaged.
        CheckpointError: it cannot be written.
    """
    path = folder / FILE
    try:
        known = read_sealed(path, History, what="a list of planned runs") or History()
    except ConfigError as error:
        raise ConfigError(f"{error}; delete it to begin anew") from error
    found = {run.run: run for run in known.runs}
    for run in _runs(folder):
        found.pop(run.run, None)
        found[run.run] = run
    history = History(runs=list(found.values())[-MOST_RUNS:])
    if history != known:
        write_sealed(path, history)
    return history


def _runs(folder: Path) -> Iterator[PlannedRun]:
    """Yield the runs in a folder that were planned and have made some steps."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        names = sorted(each.name for _, each in zip(range(MOST_FOLDERS), entries, strict=False))
    for name in names:
        try:
            plan = read_plan(folder / name / PLAN)
        except ConfigError as error:
            logger.warning("warning: %s; plans are corrected without this run", error)
            continue
        measured = _step_s(folder / name / EVENTS, plan) if plan is not None else None
        if plan is None or measured is None:
            continue
        best = plan.best[0]
        yield PlannedRun(
            run=name,
            layout=str(Layout(**best.layout)),
            times=plan.times,
            predicted_s=best.step.total / plan.correction,
            correction=plan.correction,
            measured_s=measured,
        )


def _step_s(path: Path, plan: Plan) -> float | None:
    """Return the median seconds of a planned layout's steps; None where there are too few."""
    if not path.is_file():
        return None
    planned, layout, steps = str(Layout(**plan.best[0].layout)), "", []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            event = _event(line)
            if event.get("kind") == "begin":
                layout = str(event.get("layout"))
            elif event.get("kind") == "step" and layout == planned:
                tokens, rate = event.get("tokens"), event.get("rate_tokens_per_s")
                if isinstance(tokens, int) and isinstance(rate, int | float) and rate > 0:
                    steps.append(tokens / rate)
    return _middle(steps)


def _event(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:  # the last line of a run that was killed
        return {}
    return found if isinstance(found, dict) else {}


def _middle(steps: Sequence[float]) -> float | None:
    return median(steps[WARM_UP:]) if len(steps) >= LEAST_STEPS else None
