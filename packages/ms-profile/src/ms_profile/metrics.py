"""The metrics of `--metrics`: each names the data to record and the report sections to show.

Steps, the breakdown of their time, the timeline and the advice are always recorded and shown.
"""

from collections.abc import Iterable
from enum import Flag, auto
from functools import reduce
from operator import or_
from typing import Final

from attrs import frozen

from ms_profile.errors import MetricError, nearest


class Collect(Flag):
    """Data recorded in addition to durations."""

    NOTHING = 0
    SHAPES = auto()
    """Shapes of operator inputs, which also yield message sizes."""
    MEMORY = auto()
    """Every allocation in the traced windows, and allocated memory about once per second."""
    GROUPS = auto()
    """The process group of each collective, from torch's flight recorder."""
    DATA_WAITS = auto()
    """Time spent waiting for batches, summed over the steps of each second."""


@frozen(kw_only=True)
class Metric:
    """A metric that `--metrics` can select."""

    meaning: str
    """Short description for the help text."""
    collects: Collect = Collect.NOTHING
    """Data that the recorder must collect for it."""
    shows: tuple[str, ...]
    """Report sections that it adds."""


METRICS: Final[dict[str, Metric]] = {
    "communication_time": Metric(
        meaning="collectives: transfer time, wait time, and the rank that caused each wait",
        collects=Collect.SHAPES | Collect.GROUPS,
        shows=("communication", "waiting"),
    ),
    "compute_time": Metric(
        meaning="operators and kernels, and how much of their time hides communication",
        shows=("operators",),
    ),
    "memory": Metric(
        meaning="allocated memory over time and by operator",
        collects=Collect.MEMORY,
        shows=("memory",),
    ),
    "operators": Metric(
        meaning="self and total time of each operator, by input shape",
        collects=Collect.SHAPES,
        shows=("operators", "shapes"),
    ),
    "data_time": Metric(
        meaning="time spent waiting for the next batch",
        collects=Collect.DATA_WAITS,
        shows=("data",),
    ),
    "idle": Metric(
        meaning="time with nothing running, by cause",
        shows=("idle",),
    ),
}


def collected_for(metrics: Iterable[str]) -> Collect:
    """Return the data that must be recorded to compute all of `metrics`."""
    return reduce(or_, (METRICS[name].collects for name in metrics), Collect.NOTHING)


def parse_metrics(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of metrics; the result is in the order of `METRICS`.

    Raises:
        MetricError: a name is unknown, or the list is empty.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            hint = nearest(name, METRICS) or f"; the metrics are {', '.join(METRICS)}"
            raise MetricError(f"unknown metric {name!r}{hint}")
    if not names:
        raise MetricError(
            f"metrics must name at least one metric, got {text!r}; the metrics are "
            f"{', '.join(METRICS)}"
        )
    return tuple(name for name in METRICS if name in names)
