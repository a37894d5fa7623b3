"""A plan: the layouts that were found, what was predicted of them, and why others fell out."""

from pathlib import Path
from typing import Literal

import msgspec

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError, LayoutError
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.planner.record.sealed import read_sealed, write_sealed

FILE = "plan.json"
"""Its name in `output_dir`."""
Objective = Literal["fastest", "cheapest", "least-memory", "largest-model"]


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step, by what they go to."""

    compute: float
    """Microbatches on the rank that works most, with the collectives within layers."""
    bubble: float
    """Waiting for the others of its pipeline, or for a core."""
    data: float
    """Gathering weights and summing gradients, where nothing else is done."""
    optimizer: float
    total: float

    def times(self, factor: float) -> "PlannedStep":
        """Return the same step, each part so many times as long."""
        return PlannedStep(
            **{name: value * factor for name, value in msgspec.structs.asdict(self).items()}
        )


class PlannedLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layout, its settings, and what is predicted of it."""

    layout: dict[str, int]
    """Ranks on each axis; axes of one are left out."""
    settings: dict[str, int | str]
    """The settings that were chosen, as a run file has them."""
    devices: int
    step: PlannedStep
    tokens_per_s: float
    memory: list[RankMemory]
    """Memory of a process of each pipeline rank."""
    price_per_hour: float | None = None
    """Price of all devices for an hour."""

    @property
    def most_bytes(self) -> int:
        """Memory of the rank that holds most."""
        return max(rank.total for rank in self.memory)


class PlannedOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why some candidates are not among the best."""

    reason: str
    count: int
    example: str


class PlannedConstants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose shares of its figures a device that was not measured is taken to reach."""

    chip: str
    known: bool
    """Whether the cluster names that chip; else it is the one of most like figures."""
    remedy: str | None = None
    """What to give instead, where it is not."""

    def __str__(self) -> str:
        if self.known:
            return f"shares of its figures that {self.chip} reached in published runs"
        return (
            f"those of {self.chip}, whose figures are the nearest, as no known chip is named: times"
            f" may be far off; {self.remedy}"
        )


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="plan.v1"):
    """What was found for a run on a cluster."""

    conditions: dict[str, int | str]
    """What it was found for: a run of others is planned anew."""
    objective: str
    devices: int
    """Devices of the cluster."""
    limit_bytes: int
    """Most that a rank may hold."""
    parameters: int
    times: str
    """Where its times come from: measured here, or the cluster's figures."""
    kept: dict[str, int | str]
    """Settings that the run file gives, and that were not chosen."""
    best: list[PlannedLayout]
    """Best first."""
    fallen: list[PlannedOut]
    num_hidden_layers: int | None = None
    """As many as fit, where the largest model was asked for."""
    constants: PlannedConstants | None = None
    """Where times come from the cluster's figures; None where rates and links were measured."""
    correction: float = 1.0
    """What times were multiplied by, as runs that were planned before have shown."""
    errors: list[float] = []
    """Errors of those plans: predicted over measured step time, less 1, each as it was
    corrected."""


def write_plan(path: Path, plan: Plan) -> None:
    """Write a file that `read_plan` reads, whole or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    write_sealed(path, plan)


def read_plan(path: Path) -> Plan | None:
    """Read a plan; None if there is no file.

    Raises:
        ConfigError: it cannot be read, or is damaged.
    """
    try:
        plan = read_sealed(path, Plan, what="a plan")
        if plan is not None:
            _check(plan, path)
    except (ConfigError, LayoutError) as error:
        raise ConfigError(f"{error}; restore it, or delete it to plan again") from error
    return plan


def _check(plan: Plan, path: Path) -> None:
    """Refuse a plan that names no layout there is."""
    if not plan.best or plan.correction <= 0:
        raise ConfigError(f"{path}: not a plan: it has no layout")
    for each in plan.best:
        if not each.memory or each.step.total <= 0:
            raise ConfigError(f"{path}: not a plan: a layout without memory or time")
        Layout.from_config(each.layout)
