"""What a user may ask a run to measure: each metric owns what is recorded and what is shown for it.

Steps, the split of their time, the timeline and the advice are there whatever was asked for.
"""

from collections.abc import Iterable
from typing import Final

from attrs import frozen

from ms_profile.errors import MetricError, nearest

__all__ = ["METRICS", "Metric", "Recording", "parse_metrics"]


@frozen(kw_only=True)
class Recording:
    """What is recorded beside times."""

    shapes: bool = False
    """Shapes of operators' inputs, from which the sizes of messages come too."""
    memory: bool = False
    """Every allocation in the windows, and allocated memory about once a second."""
    groups: bool = False
    """Which process group each collective belongs to, by torch's flight recorder."""
    data_waits: bool = False
    """How long each second's steps waited for their batches."""

    def __or__(self, other: "Recording") -> "Recording":
        return Recording(
            shapes=self.shapes or other.shapes,
            memory=self.memory or other.memory,
            groups=self.groups or other.groups,
            data_waits=self.data_waits or other.data_waits,
        )

    @classmethod
    def of(cls, metrics: Iterable[str]) -> "Recording":
        """The least recording from which all of `metrics` can be told."""
        whole = cls()
        for name in metrics:
            whole |= METRICS[name].records
        return whole


@frozen(kw_only=True)
class Metric:
    """One thing to measure."""

    meaning: str
    """What it tells, in a few words."""
    records: Recording = Recording()
    """What is recorded for it."""
    shows: tuple[str, ...]
    """The parts of the report that are its own."""


METRICS: Final[dict[str, Metric]] = {
    "communication_time": Metric(
        meaning="collectives: transfer, wait and who caused it",
        records=Recording(shapes=True, groups=True),
        shows=("communication", "waiting"),
    ),
    "compute_time": Metric(
        meaning="operators and kernels, and what of them hides communication",
        shows=("operators",),
    ),
    "memory": Metric(
        meaning="allocated memory over time and by operator",
        records=Recording(memory=True),
        shows=("memory",),
    ),
    "operators": Metric(
        meaning="self and total time of each operator by shape",
        records=Recording(shapes=True),
        shows=("operators", "shapes"),
    ),
    "data_time": Metric(
        meaning="waiting for the next batch",
        records=Recording(data_waits=True),
        shows=("data",),
    ),
    "idle": Metric(
        meaning="time in which nothing ran, by cause",
        shows=("idle",),
    ),
}


def parse_metrics(text: str) -> tuple[str, ...]:
    """Read a comma-separated list, in the order of `METRICS`.

    Raises:
        MetricError: a name is unknown, or there is none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            hint = nearest(name, METRICS) or f"; known are {', '.join(METRICS)}"
            raise MetricError(f"unknown metric {name!r}{hint}")
    if not names:
        raise MetricError(f"no metric in {text!r}; known are {', '.join(METRICS)}")
    return tuple(name for name in METRICS if name in names)
