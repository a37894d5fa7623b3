"""What a user may ask a run to measure, and what the tracer must record for it."""

from collections.abc import Iterable
from typing import Final

from attrs import frozen

from ms_profile.errors import MetricError, nearest

__all__ = ["METRICS", "Metric", "Recording", "parse_metrics"]


@frozen
class Metric:
    """One thing to measure."""

    meaning: str
    """What it tells, in a few words."""
    shapes: bool = False
    """Whether the tracer records the shapes of inputs: the sizes of messages come from it."""
    memory: bool = False
    """Whether the tracer records allocations."""


METRICS: Final[dict[str, Metric]] = {
    "communication_time": Metric("collectives: transfer, wait and who caused it", shapes=True),
    "compute_time": Metric("operators and kernels, and what of them hides communication"),
    "memory": Metric("allocated memory over time and by operator", memory=True),
    "operators": Metric("self and total time of each operator by shape", shapes=True),
    "data_time": Metric("waiting for the next batch"),
    "idle": Metric("time in which nothing ran, by cause"),
}


@frozen(kw_only=True)
class Recording:
    """What the tracer records beside times."""

    shapes: bool
    """Shapes of operators' inputs."""
    memory: bool
    """Allocations."""

    @classmethod
    def of(cls, metrics: Iterable[str]) -> "Recording":
        """The least recording from which all of `metrics` can be told."""
        chosen = [METRICS[name] for name in metrics]
        return cls(
            shapes=any(metric.shapes for metric in chosen),
            memory=any(metric.memory for metric in chosen),
        )


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
