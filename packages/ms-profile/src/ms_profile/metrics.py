"""What a user may ask a run to measure: each metric owns what is recorded and what is shown.

Steps, the split of their time, the timeline and the advice are there whatever was asked for.
"""

from collections.abc import Iterable
from enum import Flag, auto
from functools import reduce
from operator import or_
from typing import Final

from attrs import frozen

from ms_profile.errors import MetricError, nearest


class Collect(Flag):
    """What is recorded beside times."""

    NOTHING = 0
    SHAPES = auto()
    """Shapes of operators' inputs, from which the sizes of messages come too."""
    MEMORY = auto()
    """Every allocation in the windows, and allocated memory about once a second."""
    GROUPS = auto()
    """Which process group each collective belongs to, by torch's flight recorder."""
    DATA_WAITS = auto()
    """How long each second's steps waited for their batches."""


@frozen(kw_only=True)
class Metric:
    """One thing to measure."""

    meaning: str
    """What it measures, in a few words."""
    collects: Collect = Collect.NOTHING
    """What is recorded for it."""
    shows: tuple[str, ...]
    """The parts of the report that it adds."""


METRICS: Final[dict[str, Metric]] = {
    "communication_time": Metric(
        meaning="collectives: transfer, wait and who caused it",
        collects=Collect.SHAPES | Collect.GROUPS,
        shows=("communication", "waiting"),
    ),
    "compute_time": Metric(
        meaning="operators and kernels, and what of them hides communication",
        shows=("operators",),
    ),
    "memory": Metric(
        meaning="allocated memory over time and by operator",
        collects=Collect.MEMORY,
        shows=("memory",),
    ),
    "operators": Metric(
        meaning="self and total time of each operator by shape",
        collects=Collect.SHAPES,
        shows=("operators", "shapes"),
    ),
    "data_time": Metric(
        meaning="waiting for the next batch",
        collects=Collect.DATA_WAITS,
        shows=("data",),
    ),
    "idle": Metric(
        meaning="time in which nothing ran, by cause",
        shows=("idle",),
    ),
}


def collected_for(metrics: Iterable[str]) -> Collect:
    """Return the least that has to be recorded for all of `metrics`."""
    return reduce(or_, (METRICS[name].collects for name in metrics), Collect.NOTHING)


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
