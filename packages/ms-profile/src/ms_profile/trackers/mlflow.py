"""Events in MLflow: a server, a database, or a folder of files."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from ms_profile.trackers.continued import known_run, remember_run
from ms_profile.trackers.destination import (
    OpenRun,
    Outcome,
    Point,
    RunStart,
    checked_folder,
    need_library,
)

METRICS_A_CALL: Final = 1000
PARAMETERS_A_CALL: Final = 100
LONGEST_PARAMETER: Final = 6000
LONGEST_TAG: Final = 5000
"""What MLflow takes in one call to `log_batch`, and as one value."""
STATUS: Final = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
NOT_IN_NAMES: Final = re.compile(r"[^\w\-./ :]")


@frozen
class MLflow:
    """A run of MLflow; needs `ms-profile[mlflow]`, of which the small `mlflow-skinny` is enough.

    A training that goes on, with the same folder, goes on in the same run. MLflow cannot take back
    a point: it keeps what it has of steps that are done again. Texts are tags, the newest of each.
    """

    folder: Path = field(converter=checked_folder)
    """Where a note is kept that says which run it is."""
    experiment: str = field(default="ms-training", kw_only=True)
    """MLflow's experiment, made if missing."""
    tracking_uri: str | None = field(default=None, kw_only=True)
    """Server, database or folder; None leaves it to `MLFLOW_TRACKING_URI` or MLflow."""

    title = "MLflow"
    measures_system = False

    def check(self) -> None:
        """Refuse at once what cannot work.

        Raises:
            TrackerError: mlflow is not installed.
        """
        need_library("mlflow", extra="mlflow", package="mlflow-skinny")

    def open(self, start: RunStart, /) -> OpenRun:
        """Begin the run, or go on with the one that was begun in this folder."""
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=self.tracking_uri)
        note = self.folder / "mlflow-run.json"
        identity = known_run(note, self.title)
        if identity is None:
            found = client.get_experiment_by_name(self.experiment)
            place = found.experiment_id if found else client.create_experiment(self.experiment)
            identity = client.create_run(place, run_name=start.name).info.run_id
            remember_run(note, self.title, identity)
            known: Mapping[str, str] | None = None
        else:
            known = client.get_run(identity).data.params
            client.update_run(identity, status="RUNNING")
        run = _Run(client, identity, known)
        run.settle(start.settings)
        return run


class _Run:
    """A run, and what it has already of the steps that a resumed training does again."""

    def __init__(self, client: Any, identity: str, known: Mapping[str, str] | None) -> None:
        self._client, self._identity = client, identity
        self._resumed = known is not None
        self._settings = dict(known or {})
        self._had: dict[str, int] = {}

    def settle(self, settings: Mapping[str, Any]) -> None:
        """Log settings; MLflow fixes them, so a changed one becomes the tag `changed/NAME`."""
        from mlflow.entities import Param, RunTag

        new, changed = [], []
        for name, value in settings.items():
            key, text = _key(name), str(value)[:LONGEST_PARAMETER]
            if key not in self._settings:
                self._settings[key] = text
                new.append(Param(key, text))
            elif self._settings[key] != text:
                changed.append(RunTag(f"changed/{key}", text[:LONGEST_TAG]))
        for part in _parts(new, PARAMETERS_A_CALL):
            self._client.log_batch(self._identity, params=part)
        for part in _parts(changed, PARAMETERS_A_CALL):
            self._client.log_batch(self._identity, tags=part)

    def write(self, points: Sequence[Point], /) -> None:
        """Log all points in as few calls as MLflow allows."""
        from mlflow.entities import Metric, RunTag

        metrics: list[Any] = []
        texts: dict[str, str] = {}
        for point in points:
            if point.step is None:
                self.settle({**point.numbers, **point.texts})
                continue
            texts |= point.texts
            for name, value in point.numbers.items():
                key = _key(name)
                if point.step > self._last(key):
                    metrics.append(Metric(key, float(value), int(point.wall_s * 1000), point.step))
        for part in _parts(metrics, METRICS_A_CALL):
            self._client.log_batch(self._identity, metrics=part)
        tags = [RunTag(_key(name), text[:LONGEST_TAG]) for name, text in texts.items()]
        for part in _parts(tags, PARAMETERS_A_CALL):
            self._client.log_batch(self._identity, tags=part)

    def close(self, outcome: Outcome, /) -> None:
        """Say how the run ended."""
        self._client.set_terminated(self._identity, STATUS[outcome])

    def _last(self, key: str) -> int:
        """Return the last step of a metric that the run had when it was opened; -1 if none."""
        if not self._resumed:
            return -1
        if key not in self._had:
            history = self._client.get_metric_history(self._identity, key)
            self._had[key] = max((each.step for each in history), default=-1)
        return self._had[key]


def _key(name: str) -> str:
    """Return a name as MLflow takes it."""
    return NOT_IN_NAMES.sub("_", name)[:250]


def _parts(values: list[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(values), size):
        yield values[first : first + size]
