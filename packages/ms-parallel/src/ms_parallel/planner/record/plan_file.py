"""Plan files: the best layouts with their predictions, and the reasons for excluding others."""

from pathlib import Path
from typing import Literal

import msgspec

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError, LayoutError
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.planner.record.sealed import read_sealed, write_sealed

FILE = "plan.json"
"""File name in `output_dir`."""
Objective = Literal["fastest", "cheapest", "least-memory", "largest-model"]


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted seconds of a step, by category."""

    compute: float
    """Passes of the busiest rank, including communication within layers."""
    bubble: float
    """Waiting for other pipeline ranks, or for a CPU core."""
    data: float
    """Exposed time for gathering weights and reducing gradients."""
    optimizer: float
    total: float

    def times(self, factor: float) -> "PlannedStep":
        """Multiply all times by a factor."""
        return PlannedStep(
            **{name: value * factor for name, value in msgspec.structs.asdict(self).items()}
        )


class PlannedLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layout with its settings and predictions."""

    layout: dict[str, int]
    """Number of ranks on each axis; axes of one rank are left out."""
    settings: dict[str, int | str]
    """Chosen settings, in the form of a run file."""
    devices: int
    step: PlannedStep
    tokens_per_s: float
    memory: list[RankMemory]
    """Peak memory of a process of each pipeline rank."""
    price_per_hour: float | None = None
    """Price of all devices per hour."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory, maximum over pipeline ranks."""
        return max(rank.total for rank in self.memory)


class ExcludedCandidates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Candidates that were excluded for one reason."""

    reason: str
    count: int
    example: str


class PlannedConstants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Chip whose calibrated efficiency is used for devices that were not measured."""

    chip: str
    known: bool
    """The cluster names that chip; otherwise it is the one with the closest rates."""
    remedy: str | None = None
    """How to get better constants, if the chip is not the cluster's."""

    def __str__(self) -> str:
        if self.known:
            return f"efficiency of {self.chip} in published runs"
        return (
            f"efficiency of {self.chip}, the chip with the closest rates, as the cluster names no"
            f" known chip; times may be far off; {self.remedy}"
        )


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="plan.v1"):
    """Best layouts of a run on a cluster."""

    conditions: dict[str, int | str]
    """Everything that the plan depends on; if it differs, the run is planned again."""
    objective: str
    devices: int
    """Number of devices of the cluster."""
    limit_bytes: int
    """Memory limit of a rank."""
    parameters: int
    times: str
    """Source of the times: measured layers, or the rates of the cluster file."""
    kept: dict[str, int | str]
    """Settings of the run file, which the plan does not change."""
    best: list[PlannedLayout]
    """Layouts, best first."""
    fallen: list[ExcludedCandidates]
    """Excluded candidates by reason."""
    num_hidden_layers: int | None = None
    """Largest number of layers that fits, for the objective `largest-model`."""
    constants: PlannedConstants | None = None
    """Constants of the roofline; None if rates and links were measured."""
    correction: float = 1.0
    """Factor applied to the times, from the errors of earlier plans."""
    errors: list[float] = []
    """Errors of earlier plans: predicted, corrected step time over the measured one, minus 1."""


def write_plan(path: Path, plan: Plan) -> None:
    """Write a file for `read_plan`, atomically.

    Raises:
        CheckpointError: it cannot be written.
    """
    write_sealed(path, plan)


def read_plan(path: Path) -> Plan | None:
    """Read a plan; None without a file.

    Raises:
        ConfigError: the file cannot be read or is damaged.
    """
    try:
        plan = read_sealed(path, Plan, label="a plan")
        if plan is not None:
            _check(plan, path)
    except (ConfigError, LayoutError) as error:
        raise ConfigError(f"{error}; restore it, or delete it to plan again") from error
    return plan


def _check(plan: Plan, path: Path) -> None:
    """Reject a plan without a valid layout."""
    if not plan.best or plan.correction <= 0:
        raise ConfigError(f"{path}: not a plan: it has no layout")
    for planned in plan.best:
        if not planned.memory or planned.step.total <= 0:
            raise ConfigError(f"{path}: not a plan: a layout has no memory or time")
        Layout.from_config(planned.layout)
