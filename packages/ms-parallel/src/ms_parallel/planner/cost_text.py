"""Costs as they are written on a command line, and those of a recorded step."""

import re
from fractions import Fraction
from typing import Any

from ms_parallel.errors import ConfigError
from ms_parallel.pipeline.step_file import RecordedStep
from ms_parallel.schedules.table.costs import Costs
from ms_parallel.settings import nearest

Given = dict[str, list[Fraction]]
"""Costs by name, one value for all stages or one for each."""
COSTS = ("forward", "backward_input", "backward_weight", "activation", "latency")
MOST_DIGITS, SMALLEST = 40, 1e-30
"""Longest text and smallest value of one cost."""


def parse_costs(text: str) -> Given:
    """Parse costs by name from text such as `forward=1:1:1.4,latency=0.1`.

    Raises:
        ConfigError: a name is unknown or a value is no number.
    """
    found: Given = {}
    for part in filter(None, text.split(",")):
        name, _, values = part.strip().partition("=")
        if name not in COSTS:
            raise ConfigError(f"cost {name!r} is not known; {nearest(name, COSTS)}")
        try:
            found[name] = [_cost(value) for value in values.split(":")]
        except (ValueError, ZeroDivisionError):
            raise ConfigError(
                f"cost {part.strip()[:60]!r} is not a number; write {name}=1.3, or 1:1:1.4 a stage"
            ) from None
    return found


def _cost(text: str) -> Fraction:
    if len(text) > MOST_DIGITS:
        raise ValueError(text)
    if "/" in text:
        return Fraction(text)
    value = float(text)  # a Fraction of 1e999999999 would be a number of a billion digits
    if value == 0 and not re.search("[1-9]", re.split("[eE]", text)[0]):
        return Fraction(0)
    if not SMALLEST <= abs(value) <= 1 / SMALLEST:
        raise ValueError(text)
    return Fraction(text)


def costs_of(given: Given, stages: int, recorded: RecordedStep | None = None) -> Costs:
    """Build the costs of so many stages.

    Args:
        given: one value for all stages, or one for each.
        stages: of the schedule.
        recorded: a step whose mean costs in milliseconds stand for those that are not given;
            otherwise a pass costs 1 and a message nothing.
    """
    if recorded is not None:
        given = {**_means(recorded.costs(), stages), **given}
    each: dict[str, Any] = {
        name: given.get(name, [Fraction(1)]) * (stages if len(given.get(name, [1])) == 1 else 1)
        for name in COSTS[:-1]
    }
    (latency, *more) = given.get("latency", [Fraction(0)])
    if more:
        raise ConfigError("latency takes one value; it is the same between all ranks")
    return Costs(**each, latency=latency)


def _means(own: Costs, stages: int) -> Given:
    """Return a step's mean costs; another number of stages shares out the same layers evenly."""
    mean: Given = {"latency": [own.latency]}
    for name in COSTS[:-1]:
        values = getattr(own, name)
        mean[name] = [sum(values, Fraction(0)) / stages] * stages
        if len(values) == stages or name == "activation":
            mean[name] = list(values) if len(values) == stages else [Fraction(1)] * stages
    return mean
