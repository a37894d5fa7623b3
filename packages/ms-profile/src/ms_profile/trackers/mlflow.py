"""Send events to MLflow: a server, a database, or a folder of files."""

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

METRICS_PER_CALL: Final = 1000
PARAMETERS_PER_CALL: Final = 100
MAX_PARAMETER_CHARS: Final = 6000
MAX_TAG_CHARS: Final = 5000
"""MLflow's limits per call of `log_batch` and per value."""
STATUS: Final = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
NOT_IN_NAMES: Final = re.compile(r"[^\w\-./ :]")


@frozen
class MLflow:
    """A run in MLflow; needs `ms-profile[mlflow]`, which installs the small `mlflow-skinny`.

    A resumed training with the same folder continues the same run. MLflow cannot delete points, so
    for repeated steps it keeps the earlier values. Texts become tags with their latest value.
    """

    folder: Path = field(converter=checked_folder)
    """Folder for the file that stores the run's id."""
    experiment: str = field(default="ms-training", kw_only=True)
    """MLflow experiment, created if missing."""
    tracking_uri: str | None = field(default=None, kw_only=True)
    """Server, database or folder. None: `MLFLOW_TRACKING_URI` or MLflow's default."""

    title = "MLflow"
    measures_system = False

    def check(self) -> None:
        """Check that MLflow can be used.

        Raises:
            TrackerError: mlflow is not installed.
        """
        need_library("mlflow", extra="mlflow", package="mlflow-skinny")

    def open(self, start: RunStart, /) -> OpenRun:
        """Start the run, or continue the run started in this folder."""
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=self.tracking_uri)
        id_file = self.folder / "mlflow-run.json"
        run_id = known_run(id_file, self.title)
        if run_id is None:
            experiment = client.get_experiment_by_name(self.experiment)
            experiment_id = (
                experiment.experiment_id
                if experiment
                else client.create_experiment(self.experiment)
            )
            run_id = client.create_run(experiment_id, run_name=start.name).info.run_id
            # Before anything is logged, so that a training killed now still continues this run.
            remember_run(id_file, self.title, run_id)
            logged: Mapping[str, str] | None = None
        else:
            logged = client.get_run(run_id).data.params
            client.update_run(run_id, status="RUNNING")
        run = _Run(client, run_id, logged)
        run.log_settings(start.settings)
        return run


class _Run:
    """An open run, with the last steps it had before a training resumed."""

    def __init__(self, client: Any, run_id: str, logged: Mapping[str, str] | None) -> None:
        self._client, self._run_id = client, run_id
        self._resumed = logged is not None
        self._settings = dict(logged or {})
        self._last_steps: dict[str, int] = {}

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Log settings as parameters; MLflow forbids changes, so those become `changed/NAME`."""
        from mlflow.entities import Param, RunTag

        new, changed = [], []
        for name, value in settings.items():
            key, text = _key(name), str(value)[:MAX_PARAMETER_CHARS]
            if key not in self._settings:
                self._settings[key] = text
                new.append(Param(key, text))
            elif self._settings[key] != text:
                changed.append(RunTag(f"changed/{key}", text[:MAX_TAG_CHARS]))
        for part in _parts(new, PARAMETERS_PER_CALL):
            self._client.log_batch(self._run_id, params=part)
        for part in _parts(changed, PARAMETERS_PER_CALL):
            self._client.log_batch(self._run_id, tags=part)

    def write(self, points: Sequence[Point], /) -> None:
        """Log all points with as few calls as MLflow allows."""
        from mlflow.entities import Metric, RunTag

        metrics: list[Any] = []
        texts: dict[str, str] = {}
        for point in points:
            if point.step is None:
                self.log_settings({**point.numbers, **point.texts})
                continue
            texts |= point.texts
            for name, value in point.numbers.items():
                key = _key(name)
                # A resumed training repeats steps that the run already has.
                if point.step > self._last(key):
                    metrics.append(Metric(key, float(value), int(point.wall_s * 1000), point.step))
        for part in _parts(metrics, METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=part)
        tags = [RunTag(_key(name), text[:MAX_TAG_CHARS]) for name, text in texts.items()]
        for part in _parts(tags, PARAMETERS_PER_CALL):
            self._client.log_batch(self._run_id, tags=part)

    def close(self, outcome: Outcome, /) -> None:
        """Set the run's final status."""
        self._client.set_terminated(self._run_id, STATUS[outcome])

    def _last(self, key: str) -> int:
        """Return the last step of a metric that the run had when it was opened; -1 for none."""
        if not self._resumed:
            return -1
        if key not in self._last_steps:
            history = self._client.get_metric_history(self._run_id, key)
            self._last_steps[key] = max((metric.step for metric in history), default=-1)
        return self._last_steps[key]


def _key(name: str) -> str:
    """Return the name with characters that MLflow forbids replaced."""
    return NOT_IN_NAMES.sub("_", name)[:250]


def _parts(values: list[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(values), size):
        yield values[first : first + size]
