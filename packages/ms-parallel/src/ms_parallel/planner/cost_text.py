"""Parses costs from the command line, and derives costs from a recorded step."""

import re
from fractions import Fraction
from typing import Any

from ms_parallel.errors import ConfigError
from ms_parallel.pipeline.step_file import RecordedStep
from ms_parallel.schedules.table.costs import Costs
from ms_parallel.settings import nearest

CostValues = dict[str, list[Fraction]]
"""Costs by name: one value for all stages, or one per stage."""
COSTS = ("forward", "backward_input", "backward_weight", "activation", "latency")
MAX_DIGITS, MIN_VALUE = 40, 1e-30
"""Maximum length of the text of a cost, and minimum value."""


def parse_costs(text: str) -> CostValues:
    """Parse costs such as `forward=1:1:1.4,latency=0.1`.

    Raises:
        ConfigError: a name is unknown or a value is not a number.
    """
    costs: CostValues = {}
    for part in filter(None, text.split(",")):
        name, _, values = part.strip().partition("=")
        if name not in COSTS:
            raise ConfigError(f"unknown cost {name!r}; {nearest(name, COSTS)}")
        try:
            costs[name] = [_cost(value) for value in values.split(":")]
        except (ValueError, ZeroDivisionError):
            raise ConfigError(
                f"cost {part.strip()[:60]!r} is not a number; write {name}=1.3, or {name}=1:1:1.4"
                " with one value per stage"
            ) from None
    return costs


def _cost(text: str) -> Fraction:
    if len(text) > MAX_DIGITS:
        raise ValueError(text)
    if "/" in text:
        return Fraction(text)
    value = float(text)  # Fraction("1e999999999") would be an integer of a billion digits
    # A written zero is allowed, but not a number so small that it underflows to zero.
    if value == 0 and not re.search("[1-9]", re.split("[eE]", text)[0]):
        return Fraction(0)
    if not MIN_VALUE <= abs(value) <= 1 / MIN_VALUE:
        raise ValueError(text)
    return Fraction(text)


def costs_of(values: CostValues, stages: int, recorded: RecordedStep | None = None) -> Costs:
    """Build the costs of a number of stages.

    Args:
        values: one value for all stages, or one per stage.
        stages: number of stages of the schedule.
        recorded: step whose mean costs in milliseconds are the defaults; without it a pass costs 1
            and a message 0.
    """
    if recorded is not None:
        values = {**_means(recorded.costs(), stages), **values}
    by_stage: dict[str, Any] = {
        name: values.get(name, [Fraction(1)]) * (stages if len(values.get(name, [1])) == 1 else 1)
        for name in COSTS[:-1]
    }
    (latency, *extra) = values.get("latency", [Fraction(0)])
    if extra:
        raise ConfigError(
            "latency must be one value, the same between all ranks, got several; use one"
        )
    return Costs(**by_stage, latency=latency)


def _means(costs: Costs, stages: int) -> CostValues:
    """Mean costs of a recorded step for a schedule with `stages` stages.

    With another number of stages, the total time is divided evenly among them, and the activation
    memory is 1 per stage.
    """
    mean: CostValues = {"latency": [costs.latency]}
    for name in COSTS[:-1]:
        values = getattr(costs, name)
        mean[name] = [sum(values, Fraction(0)) / stages] * stages
        if len(values) == stages or name == "activation":
            mean[name] = list(values) if len(values) == stages else [Fraction(1)] * stages
    return mean
